"""Runs written by hand in the file's format, and a real browser."""

import json
import os
import shutil
import subprocess

import pytest

HEADER = {
    "ezpz_obs": 1, "attempt": 0, "time": 1_732_000_000.0, "run": "test-run", "rank": 0,
    "world_size": 4, "host": "n0", "hosts": "n[0-1]", "machine": "polaris", "continues": None,
    "job": {"scheduler": "pbs", "id": "7", "launcher": "pals"},
    "git": {"commit": "8ec88b4", "dirty": True}, "versions": {"python": "3.11.7"},
    "argv": ["train.py", "--lr", "0.1"], "config": {"lr": 0.1, "model": {"layers": 2}},
}  # fmt: skip


@pytest.fixture
def write_run(tmp_path):
    """Write lines to a run's file; without a header among them, one before all."""

    def write(*lines, folder="run", tail="", **header):
        path = tmp_path / folder / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not any("ezpz_obs" in line for line in lines):
            lines = ({**HEADER, **header}, *lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
        return path.parent

    return write


@pytest.fixture
def header():
    """Make another attempt's first line."""
    return lambda **fields: {**HEADER, **fields}


@pytest.fixture
def records():
    """Make records of steps, half a second each."""

    def make(steps, *, start=1_732_000_000.0, **metrics):
        return [
            {"step": step, "time": start + 0.5 * step}
            | {name: of(step) if callable(of) else of for name, of in metrics.items()}
            for step in steps
        ]

    return make


@pytest.fixture
def command(python):
    """Run ezpz-obs as a process, which may do something before."""

    def run(*words, before="pass", env=(), **given):
        code = f"import sys; {before}; from ezpz_obs._cli import main; sys.exit(main())"
        env = {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **dict(env)}
        return python(code, *words, env=env, **given)

    return run


@pytest.fixture
def browser(tmp_path):
    """Let headless Chromium do something with a page, and return what it wrote."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None and not os.environ.get("CI"):
        pytest.skip("Chromium is not installed")

    def run(page, *options, width=1280, height=1600, dark=False):
        profile = tmp_path / "profile"
        done = subprocess.run(
            [
                found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
                "--no-first-run", "--disable-background-networking", "--disable-component-update",
                "--disable-sync", "--hide-scrollbars", f"--user-data-dir={profile}",
                f"--window-size={width},{height}", *(["--force-dark-mode"] if dark else []),
                *options, page if "://" in str(page) else page.as_uri(),
            ],
            capture_output=True, check=True,
        )  # fmt: skip
        shutil.rmtree(profile, ignore_errors=True)
        return done.stdout.decode()

    return run
