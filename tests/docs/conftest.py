"""The pages, and what their blocks leave behind: each page has one folder that they run in."""

import os

import pytest
from forked_ranks import clean_env, fork_server, prelude, ranks, user_env
from tests.conftest import load

# In this order: each may import those before it.
for _name in ("blocks", "python_blocks", "shell_blocks"):
    load(f"docs.{_name}")


@pytest.fixture(autouse=True)
def _no_job_of_ours(monkeypatch, tmp_path):
    """Blocks see a shell on a plain host, and write no record of the user's launches."""
    for name in os.environ:
        if name.startswith(("EZPZ_", "SLURM", "PBS_", "PMI", "OMPI_", "MASTER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EZPZ_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def preloaded():
    # torch._dynamo: what an optimizer imports at its first step, for a second on each rank.
    return ["torch._dynamo", "ezpz_dist", "ezpz_tp", "ezpz_obs"]


@pytest.fixture
def on_ranks(ranks, tmp_path):
    """Save a script, run it on real ranks, and return what they printed."""

    def run(name, code, count=2):
        (tmp_path / name).write_text(code, encoding="utf-8")
        return "".join(ranks(count, "", program=tmp_path / name, cwd=tmp_path))

    return run
