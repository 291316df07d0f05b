import os
import subprocess
import sys

import pytest

from ezpz_launch._record import PROGRESS_VARIABLE, read_progress


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (b"0", 0),
        (b"1200", 1200),
        (b"1200\n", 1200),
        (b" 7 \r\n", 7),
        (b"000012", 12),
        (b"9" * 18, 10**18 - 1),
        (b"", None),
        (b"\n", None),
        (b"-1", None),
        (b"+1", None),
        (b"1.5", None),
        (b"1e3", None),
        (b"1_000", None),
        (b"12 13", None),
        (b"12\n13\n", None),
        (b"step 12", None),
        (b"9" * 19, None),
        (b"1" + b" " * 100 + b"2", None),
        (b"\xff\xfe1\x00", None),
        ("١٢".encode(), None),
        (b"\x00" * 4096, None),
    ],
)
def test_what_counts_as_a_step(tmp_path, text, step):
    path = tmp_path / "progress"
    path.write_bytes(text)
    assert read_progress(str(path)) == step


def test_nothing_to_read(tmp_path):
    assert read_progress(str(tmp_path / "absent")) is None
    assert read_progress(str(tmp_path)) is None
    assert read_progress("") is None


def test_a_fifo_is_no_report(tmp_path):
    os.mkfifo(tmp_path / "progress")
    assert read_progress(str(tmp_path / "progress")) is None


def test_both_ways_of_the_contract(tmp_path):
    path = str(tmp_path / "a b.progress")
    env = {**os.environ, PROGRESS_VARIABLE: path}
    subprocess.run(
        ["sh", "-c", 'echo 1200 > "$EZPZ_PROGRESS_FILE"'], env=env, check=True, timeout=60
    )
    assert read_progress(path) == 1200
    # the lines of the module's own text
    import ezpz_launch._record as module

    _, _, text = module.__doc__.partition("::\n\n")
    code = text.partition("\n\n")[0]
    assert "os.replace" in code
    program = "import os, textwrap\nrank, step = 0, 1300\nexec(textwrap.dedent(os.environ['CODE']))"
    subprocess.run([sys.executable, "-c", program], env={**env, "CODE": code}, check=True)
    assert read_progress(path) == 1300
    assert os.listdir(tmp_path) == ["a b.progress"]
