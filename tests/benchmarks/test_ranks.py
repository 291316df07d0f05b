"""Worlds of ranks: who failed is said at once, whoever waits for it."""

import time

import pytest
from ranks import RanksError, ranks

BREAKS = """
import json, sys, time
if json.loads(sys.argv[1])["rank"] == 1:
    raise OSError("it broke")
time.sleep(600)
"""
SAYS = """
import json, os, sys
job = json.loads(sys.argv[1])
print("x" * 300_000, file=sys.stderr)
print("y" * 300_000)
print(json.dumps([job["ranks"], job["what"], os.environ["TORCH_DEVICE"]]))
"""


def test_a_rank_that_fails_ends_the_others_and_is_named(tmp_path, capfd):
    (tmp_path / "breaks.py").write_text(BREAKS)
    began = time.monotonic()
    with pytest.raises(RanksError, match=r"^breaks.py, rank 1: OSError: it broke$"):
        ranks(str(tmp_path / "breaks.py"), {}, 2)
    assert time.monotonic() - began < 120
    assert "Traceback" in capfd.readouterr().err


def test_rank_0_answers_and_computes_on_the_cpu(tmp_path):
    (tmp_path / "says.py").write_text(SAYS)
    assert ranks(str(tmp_path / "says.py"), {"what": 7}, 2) == [2, 7, "cpu"]
