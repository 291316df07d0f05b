"""The real command and the real mpiexec of this environment; without one, a skip that says so."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import waiting
from forked_ranks import user_env

COUNTS = (
    "import os, signal, time\n"
    "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'heard\\n'))\n"
    "print('ready', flush=True)\n"
    # A signal that comes just before a sleep is handled after it.
    "while True: time.sleep(0.05)\n"
)


@pytest.fixture
def clean_env(user_env, tmp_path_factory):
    """The environment of a user outside of any job, with records of its own."""
    return {**user_env, "EZPZ_STATE_DIR": str(tmp_path_factory.mktemp("state"))}


@pytest.fixture
def program(tmp_path):
    """Make an executable of these lines of sh; return its path."""

    def make(name, *lines):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def small_disk():
    """Make words behind which a command runs in a folder that is a file system of its own."""

    def make(size, folder):
        mount = f"mount -t tmpfs -o size={size} none {shlex.quote(str(folder))}"
        own = ["unshare", "--mount", "--map-root-user", "--propagation", "private", "sh", "-c"]
        words = [*own, f'{mount} && cd {shlex.quote(str(folder))} && exec "$@"', "sh"]
        if shutil.which("unshare") is None:
            pytest.skip("no unshare here: no file system of our own")
        if subprocess.run([*words, "true"], check=False, capture_output=True).returncode:
            pytest.skip("this user may mount nothing")
        return words

    return make


@pytest.fixture
def mpiexec(clean_env):
    """Path of a real mpiexec."""
    path = shutil.which("mpiexec", path=clean_env["PATH"])
    if path is None:
        pytest.skip("no mpiexec here: pip install mpich")
    return path


@pytest.fixture
def launch(clean_env, mpiexec, tmp_path):
    """Run ezpz-launch to its end; nothing may be left running or lying about afterwards."""
    reports = tmp_path / "reports"
    reports.mkdir()

    def run(*words, env=None, **kwargs):
        return subprocess.run(
            [sys.executable, "-m", "ezpz_launch", *words],
            env={**clean_env, "TMPDIR": str(reports), **(env or {})}, capture_output=True,
            check=False, **{"text": True, **kwargs},
        )  # fmt: skip

    yield run
    assert list(reports.iterdir()) == []


@pytest.fixture
def spawned(launch):
    """As launch, with the spawner."""

    def run(*words, **options):
        return launch("--launcher", "spawn", *words, **options)

    return run


@pytest.fixture
def history(launch):
    """The records of this user's launches."""
    return lambda **options: json.loads(launch("launches", "--json", **options).stdout)


@pytest.fixture
def until():
    """Wait for a condition; fail if it is still false after a generous time."""
    return lambda condition, seconds=20: waiting.until(condition, seconds)


@pytest.fixture
def process():
    """Start processes that are gone afterwards, each in a process group of its own by default."""
    started = []

    def start(*words, process_group=0, **options):
        child = subprocess.Popen(words, process_group=process_group, **options)
        started.append((child, process_group == 0 or options.get("start_new_session", False)))
        return child

    yield start
    for child, leads in started:
        if leads:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        child.kill()
        for pipe in filter(None, (child.stdin, child.stdout, child.stderr)):
            pipe.close()
        child.wait()


@pytest.fixture
def rank(process):
    """Start a process that says that it is ready, and when it hears SIGUSR1."""

    def start(*words, env=None, **options):
        words = words or (sys.executable, "-c", COUNTS)
        child = process(*words, stdout=-1, env={**os.environ, **(env or {})}, **options)
        assert child.stdout.readline() == b"ready\n"
        return child

    return start


@pytest.fixture
def background(clean_env, process):
    """Start ezpz-launch with the spawner, without waiting for it."""

    def start(*words, env=None, **options):
        return process(
            *(sys.executable, "-m", "ezpz_launch", "--launcher", "spawn", *words),
            env={**clean_env, **(env or {})},
            **options,
        )

    return start
