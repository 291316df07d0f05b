import json
import os
import subprocess
import sys
import time

import pytest

from ezpz_obs import configure_logs, get_logger
from ezpz_obs._terminal import LogFile


@pytest.fixture
def said():
    return []


@pytest.fixture
def make(said, tmp_path):
    files = []

    def make(path=tmp_path / "logs" / "rank-00000.jsonl"):
        files.append(LogFile(path, level=20, complain=said.append))
        return files[-1]

    yield make
    for file in files:
        file.close()


def test_a_line_is_there_at_once(make, said):
    file = make()
    assert file.write(b"{}\n", 1.0)
    assert file.path.read_bytes() == b"{}\n"
    assert said == []


def test_a_restarted_run_goes_on(make):
    make().write(b'{"a":1}\n', 1.0)
    again = make()
    again.write(b'{"a":2}\n', 1.0)
    assert again.path.read_bytes() == b'{"a":1}\n{"a":2}\n'


def test_a_half_written_line_is_ended(make):
    file = make()
    file.path.parent.mkdir()
    file.path.write_bytes(b'{"a":1}\n{"a"')
    file.write(b'{"a":2}\n', 1.0)
    assert file.path.read_bytes().splitlines() == [b'{"a":1}', b'{"a"', b'{"a":2}']


def test_a_removed_folder(make, said):
    file = make()
    file.write(b"{}\n", 1.0)
    file.path.unlink()
    file.path.parent.rmdir()
    file.write(b'{"a":2}\n', 3.0)
    assert file.path.read_bytes() == b'{"a":2}\n'
    assert len(said) == 1
    assert "was removed" in said[0]


def test_no_folder_can_be_made(make, said, tmp_path):
    (tmp_path / "in-the-way").write_text("")
    file = make(tmp_path / "in-the-way" / "rank-00000.jsonl")
    file.open(1.0)
    for second in range(3):
        assert not file.write(b"{}\n", 1.0 + second)
    assert len(said) == 1
    assert "in-the-way" in said[0]
    assert "the run goes on" in said[0]
    (tmp_path / "in-the-way").unlink()
    assert file.write(b"{}\n", 9.0)
    assert file.lost == 3


def test_a_clock_that_is_set_back(make):
    file = make()
    file.write(b"{}\n", 1e9)
    file.path.unlink()
    file.write(b"{}\n", 1.0)
    assert file.path.read_bytes() == b"{}\n"


FULL = """
import os, resource, sys
from ezpz_obs import configure_logs, get_logger
configure_logs(directory={folder!r})
logger = get_logger("train")
logger.info("before")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
for step in range(20):
    logger.info("step", number=step, padding="x" * 50)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
logger.info("there is room again")
print("done")
"""


def test_a_full_disk_warns_once_and_the_run_goes_on(tmp_path):
    # A limit that the process sets itself fails as a full disk does: in the middle of a line.
    done = subprocess.run(
        [sys.executable, "-c", FULL.format(folder=str(tmp_path / "logs"))],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "done\n"
    (warning,) = [line for line in done.stderr.splitlines() if "[warning" in line]
    assert "cannot be written (File too large)" in warning
    lines = (tmp_path / "logs" / "rank-00000.jsonl").read_bytes().splitlines()
    found, torn = [], 0
    for line in lines:
        try:
            found.append(json.loads(line)["event"])
        except ValueError:
            torn += 1
    assert torn <= 1
    assert found[0] == "before"
    assert found[-2] == "there is room again"
    assert "log lines before this one were lost: File too large" in found[-1]


def test_dev_full(make, said):
    file = make()
    file.path.parent.mkdir()
    file.path.symlink_to("/dev/full")
    assert not file.write(b"{}\n", 1.0)
    assert not file.write(b"{}\n", 1.1)
    assert len(said) == 1
    assert "No space left on device" in said[0]


def test_it_is_never_standard_error(tmp_path):
    code = (
        "import os, sys\n"
        "from ezpz_obs import configure_logs, get_logger\n"
        "configure_logs(directory=sys.argv[1])\n"
        "get_logger('x').info('hello')\n"
        "for descriptor in (1, 2):\n"
        "    try: os.write(descriptor, b'what native code prints')\n"
        "    except OSError: pass\n"
    )
    words = ["sh", "-c", 'exec "$0" -c "$1" "$2" 0<&- 1>&- 2>&-', sys.executable, code]
    subprocess.run([*words, str(tmp_path)], check=True, timeout=60)
    (line,) = (tmp_path / "rank-00000.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "hello"


KILLED = """
import os, signal, sys
from ezpz_obs import configure_logs, get_logger
configure_logs(directory=sys.argv[1])
logger = get_logger("train")
step = 0
while True:
    logger.info("step", number=step)
    os.write(1, b"%d\\n" % step)
    step += 1
"""


def test_kill_9_loses_nothing(tmp_path):
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.readline()
        time.sleep(0.05)
        process.kill()
        told = process.stdout.read().split(b"\n")
    lines = (tmp_path / "rank-00000.jsonl").read_text().splitlines()
    numbers = [json.loads(line)["number"] for line in lines]
    assert numbers == list(range(len(numbers)))
    # What the process said it had logged is there.
    assert int(told[-2]) in numbers[-2:]


def test_threads_do_not_mix_their_lines(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with configure_logs(directory=tmp_path, level="ERROR") as logs:
        logger = get_logger("train")
        with ThreadPoolExecutor(4) as pool:
            for number in range(400):
                pool.submit(logger.info, "x" * 5000, number=number)
        lines = logs.path.read_text().splitlines()
    assert sorted(json.loads(line)["number"] for line in lines) == list(range(400))


def test_the_file_is_not_left_to_programs_that_are_started(make):
    file = make()
    file.write(b"{}\n", 1.0)
    assert not os.get_inheritable(file._descriptor)
