"""The pages, and what their blocks leave behind: each page has one folder that they run in."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def _load(name):
    """Import a module of this folder by path: no folder of tests is on ``sys.path``."""
    qualified = f"tests.docs.{name}"
    pytest.register_assert_rewrite(qualified)
    finders = (finder.find_spec(qualified, [str(HERE)]) for finder in sys.meta_path)
    spec = next(filter(None, finders))
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module
    spec.loader.exec_module(module)
    return module


# In this order: each may import those before it.
for _name in ("blocks", "messages", "python_blocks", "shell_blocks"):
    _load(_name)


@pytest.fixture(autouse=True)
def _no_job_of_ours(monkeypatch, tmp_path):
    """Blocks see a shell on a plain host, and write no record of the user's launches."""
    for name in os.environ:
        if name.startswith(("EZPZ_", "SLURM", "PBS_", "PMI", "OMPI_", "MASTER_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("EZPZ_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
