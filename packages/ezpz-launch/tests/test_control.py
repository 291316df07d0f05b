import os
import subprocess
import sys

import pytest

from ezpz_launch import UsageError
from ezpz_launch._launch import Control, fold_ranks


def control(**fields):
    return Control("ID.0", 21.4, **fields)


def test_one_field_a_line_and_none_empty():
    # sh drops empty ones: what follows would be read as another
    full = control(
        where=("10.0.0.1:5", "[fe80::1]:6"), secret="a", node_timeout=7, files="/a b", tee=True,
        only_ranks=(0, 2, 3), prefix=True, port=29500, device_type="cuda", devices=4,
        one_device=True, attempt=2, progress_file="/p q", job_id="12.pbs",
    )  # fmt: skip
    here = os.path.dirname(sys.modules[Control.__module__].__file__)
    assert control().value().split("\n") == [
        "ID.0", "21", sys.executable, "-", "-", "-", "15", "-", "all", "-", "-", "-", "-", "0",
        "0", "0", "-", "-",
    ]  # fmt: skip
    assert full.value().split("\n") == [
        "ID.0", "21", sys.executable, f"{here}/_agent.py", "10.0.0.1:5 [fe80::1]:6", "a", "7",
        "/a b", "0,2-3", f"{here}/rank_output.py", "--prefix", "29500", "cuda", "4", "1", "2",
        "/p q", "12.pbs",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "is_pumped"),
    [
        ({}, False),
        ({"files": "/f"}, False),
        ({"files": "/f", "prefix": True}, False),
        ({"files": "/f", "tee": True}, True),
        ({"prefix": True}, True),
    ],
)
def test_a_program_pumps_only_where_sh_cannot(fields, is_pumped):
    assert (control(**fields).value().split("\n")[9] != "-") is is_pumped


def test_a_path_with_a_line_break():
    with pytest.raises(UsageError, match="holds a line break; expected a path without one"):
        control(files="/a\nb").value()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0,), "0"), ((0, 1), "0-1"), ((5, 1, 3, 2, 5), "1-3,5"), (range(120_960), "0-120959")],
)
def test_ranks_as_ranges(ranks, text):
    assert fold_ranks(ranks) == text


def test_the_words_of_the_shims_own_list():
    """Its header lists the fields in their order; so does the code that reads them."""
    value = control(port=7, attempt=3, job_id="J").value()
    script = 'IFS="\n"; set -f; set -- $EZPZ_CONTROL; echo $# $1 ${12} ${16} ${18}'
    done = subprocess.run(
        ["sh", "-c", script], env={**os.environ, "EZPZ_CONTROL": value}, capture_output=True,
        check=True, text=True,
    )  # fmt: skip
    assert done.stdout == "18\nID.0\n7\n3\nJ\n".replace("\n", " ")[:-1] + "\n"
