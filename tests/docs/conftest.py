"""The pages, and what their blocks leave behind: each page has one folder that they run in."""

import os

import pytest
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
