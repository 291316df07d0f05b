"""Examples on ranks, as a user's command starts them; or in this process, as a world of one."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture
def clean_env(clean_env, tmp_path_factory):
    """The environment of that user, whose records are ours."""
    return {
        **clean_env,
        "EZPZ_STATE_DIR": str(tmp_path_factory.mktemp("state")),
        # No example may need the network, nor ask for an account.
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
    }


@pytest.fixture
def launch(ranks):
    """Run an example on n forked ranks to its end, as ``python -m`` does; return their words."""

    def run(n, name, *words, cwd):
        done = ranks(
            n,
            f"""
            import atexit, runpy, sys
            sys.argv = {["", *words]!r}
            try:
                runpy.run_module("ezpz.examples.{name}", run_name="__main__", alter_sys=True)
            finally:
                atexit._run_exitfuncs()
            """,
            check=False, cwd=cwd,
        )  # fmt: skip
        said = "".join(out + err for _, out, err in done)
        assert [status for status, _, _ in done] == [0] * n, said
        return said

    return run


@pytest.fixture
def alone(monkeypatch, clean_env):
    """Let this process be a user's, outside of any job."""
    for name in os.environ.keys() - clean_env.keys() | {"EZPZ_STATE_DIR"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield monkeypatch
    import torch.distributed as dist

    import ezpz
    import ezpz_tp

    # What one that was refused half-way has left: ours, or those of a script without ezpz.
    ezpz_tp.destroy_tensor_parallel()
    ezpz.cleanup()
    if dist.is_initialized():
        dist.destroy_process_group()


def records(folder):
    """Return the records of metrics.jsonl: of a History, or plain lines of JSON."""
    lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [one for one in found if "step" in one and "event" not in one and "ezpz_obs" not in one]


def curve(folder, metric):
    """Return step and value of every record that has a metric."""
    return [(one["step"], one[metric]) for one in records(folder) if metric in one]
