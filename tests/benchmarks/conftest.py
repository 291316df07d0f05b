"""The modules of ``benchmarks/``, which is no package, and a result of a whole run."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))


@pytest.fixture(scope="session")
def recorded():
    """The path of what ``bench:all --json`` once wrote; its ``machine`` and ``date`` say where."""
    return str(Path(__file__).with_name("recorded.json"))


@pytest.fixture(scope="session")
def document(recorded):
    return json.loads(Path(recorded).read_text(encoding="utf-8"))
