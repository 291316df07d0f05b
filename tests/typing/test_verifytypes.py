"""What type checkers and editors see of the public packages: everything, with its type."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "ezpz", "ezpz_device", "ezpz_dist", "ezpz_launch", "ezpz_obs", "ezpz_spmd", "ezpz_topo",
    "ezpz_tp",
)  # fmt: skip
# What documented usage must not be: each line is one error.
MISTAKES = """\
import ezpz

ezpz.get_rnak()
ezpz.get_rank().upper()
ezpz.tp.initialize_tensor_paralell(2)
ezpz.setup_torch(sead=42)
"""


def pyright(*words):
    """Run pyright with the Python of these tests; return its answer."""
    # It takes the packages of the first `python` on PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", *words],
        env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def answers():
    """Ask about all packages, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return {
            name: pool.submit(pyright, "--verifytypes", name, "--ignoreexternal")
            for name in PACKAGES
        }


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_known_type(answers, package):
    answer = answers[package].result()["typeCompleteness"]
    # A package that was not found is complete, too.
    assert answer["exportedSymbolCounts"]["withKnownType"] > 0
    unknown = [
        "{}: {}".format(each["name"], "; ".join(d["message"] for d in each["diagnostics"]))
        for each in answer["symbols"]
        if each["isExported"] and (not each["isTypeKnown"] or each["isTypeAmbiguous"])
    ]
    assert not unknown, "\n".join(unknown)
    assert answer["completenessScore"] == 1


def test_documented_usage_is_typed_as_documented_and_a_mistake_is_told(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(MISTAKES, encoding="utf-8")
    answer = pyright(str(HERE / "api.py"), str(script))
    told = [
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"])
        for each in answer["generalDiagnostics"]
    ]
    assert [each for each in told if each[0] == "api.py"] == []
    assert {line for _, line, _ in told} == {3, 4, 5, 6}
    assert answer["summary"]["filesAnalyzed"] == 2
