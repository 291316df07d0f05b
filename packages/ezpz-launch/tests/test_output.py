"""What ranks write reaches us as it is, reports apart; what becomes of it stops no training."""

import contextlib
import os
import signal
import subprocess
import tty

import pytest
from waiting import all_of

from ezpz_launch._run.output import Output, Reports

ID = "20260101T000000000001Z-42-abcdef.0"


def copy(what, rank, value, launch_id=ID):
    words = f"{what[0]} {rank} {value}"
    return f"\x1e{launch_id.rpartition('-')[2]} {words}|{words}\x1f\n".encode()


def twice(*report):
    return copy(*report) * 2


def sifted(*chunks):
    reports, kept, found = Reports(ID), b"", []
    for chunk in chunks:
        more, reported = reports.feed(chunk)
        kept, found = kept + more, found + reported
    return kept + reports.rest(), found


_OF_RANKS = b"\n" + b"=" * 83 + b"\n=   BAD TERMINATION\n"
_OF_PROXIES = b"[mpiexec@node-1] HYDU_sock_write (sock.c:250): write error (Bad file descriptor)\n"


@pytest.mark.parametrize(("words", "cut"), [
    (_OF_RANKS, 0), (_OF_RANKS, 51), (_OF_PROXIES, 0), (_OF_PROXIES, 17),
])  # fmt: skip
def test_hydras_words_on_its_end_are_left_out(words, cut):
    output = Output(ID, lambda: None)
    shown = [output._filter(1, b"rank 0\n")]
    output.is_quiet = True
    shown += [output._filter(1, each) for each in (words[:cut], words[cut:], b"=   PID 7\n")]
    assert b"".join(shown) == b"rank 0\n"


STREAMS = {
    "nothing": (b"", []),
    "a line": (b"a line\n", []),
    "no text at all": (bytes(range(256)), []),
    "separators": (b"\x1e\x1e\x1f\n\x1e \x1f\x1f\n\x1eabcdef\x1f\n\x1e", []),
    "another launch": (copy("start", 0, 7, "other.0"), []),
    "the next attempt": (copy("end", 0, 7, ID[:-1] + "10"), []),
    "an id that goes on": (copy("end", 0, 7, ID + "1"), []),
    "the beginning of one": (b"x\x1eabcdef", []),
    "no report after all": (b"a\x1eabcdef!\x1f\n", []),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("between", [False, True], ids=["alone", "between reports"])
def test_what_is_no_report_is_kept_at_every_boundary(name, between):
    data, reports = STREAMS[name]
    stream, expected = data, reports
    if between:
        stream = twice("start", 3, 4711) + data + b"\n" + twice("end", 3, 139)
        data += b"\n"
        expected = [("start", 3, 4711)] * 2 + [("end", 3, 139)] * 2
    for cut in range(len(stream) + 1):
        assert sifted(stream[:cut], stream[cut:]) == (data, expected), cut
    for size in (1, 2, 7, 50):
        pieces = (stream[i : i + size] for i in range(0, len(stream), size))
        assert sifted(*pieces) == (data, expected), size


ANOTHER = twice("end", 5, 6)


@pytest.mark.parametrize(
    "piece",
    [b"other\n", b"7\n", b"7", b"\x1e", b"\xff\x00", b"x" * 159, b"x" * 500, ANOTHER],
    ids=["line", "digit's line", "digit", "separator", "bytes", "long", "longer", "report"],
)
def test_a_piece_of_another_rank_between(piece):
    """srun and Open MPI cut a stream anywhere: one of the copies is whole, and is heard."""
    for whole, own in (
        (twice("start", 3, 4711), ("start", 3, 4711)),
        (twice("end", 1, 3), ("end", 1, 3)),
    ):
        for cut in range(1, len(whole)):
            kept, found = sifted(whole[:cut] + piece + whole[cut:])
            assert set(found) == {own, *([("end", 5, 6)] if piece == ANOTHER else [])}, cut
            assert piece in kept or piece == ANOTHER, cut


@pytest.mark.parametrize(
    "words", ["s 1", "s 1 2 3", "s x 2", "s 1 -2", "s 1 2.5", "", "s ² 1", "x 1 2"]
)
def test_what_is_damaged_is_no_report(words):
    _, found = sifted(f"\x1eabcdef.0 {words}|{words}\x1f\n".encode())
    assert found == []


# copying


@pytest.fixture
def copied(capfdbinary):
    """Copy what two commands write to our streams or these; return what came, and the Output."""

    def copy(first, second, patience=60, **streams):
        feeders = [
            subprocess.Popen(["bash", "-c", words], stdin=subprocess.DEVNULL, stdout=-1)
            for words in (first, second)
        ]
        ours = {number: os.dup(number) for number in (1, 2)}
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(streams.get(name, number), number)
        output = Output("ID", lambda: None)
        output.start_copying(*(feeder.stdout for feeder in feeders))
        output.wait_for_pipes(patience, lambda: False)
        output.close(lambda: False)
        for number, own in ours.items():
            os.dup2(own, number)
            os.close(own)
        for feeder in feeders:
            feeder.kill()
            feeder.wait()
        return *capfdbinary.readouterr(), output

    return copy


def test_reports_are_taken_out_of_both_streams_and_what_looks_like_one_is_not(copied):
    # some launchers can be told to merge them
    text = r"printf 'a\036ID e 3 7|e 3 7\037\nb\036I'"
    out, err, output = copied(text, text)
    assert (out, err) == (b"ab\x1eI", b"ab\x1eI")
    assert output.drain_reports() == [("end", 3, 7)] * 2


@pytest.mark.parametrize(("stream", "ends"), [("stdout", True), ("stderr", False)])
def test_no_one_reads(copied, stream, ends):
    read, write = os.pipe()
    os.close(read)
    words = ["seq 300000", "echo still here"]
    out, err, output = copied(*(words if ends else words[::-1]), **{stream: write})
    os.close(write)
    # only `| head` ends a program
    assert (err if ends else out, output.nobody_reads) == (b"still here\n", ends)


def test_a_full_disk_is_said_once_and_ends_nothing(copied, background):
    with open("/dev/full", "wb") as full:
        _, err, output = copied("seq 300000", "true", stdout=full.fileno())
        assert err == b"ezpz-launch: cannot write the output: No space left on device\n"
        assert output.nobody_reads is False
        script = "seq 300000; seq 300000 >&2; exit 3"
        launch = background("-n", "2", "sh", "-c", script, stdout=full, stderr=full)
        assert launch.wait() == 3


def test_standard_output_that_somebody_made_nonblocking(copied, tmp_path):
    read, write = os.pipe()
    os.set_blocking(write, False)
    path = tmp_path / "read"
    with path.open("wb") as file:
        reader = subprocess.Popen(["sh", "-c", "sleep 0.3; cat"], stdin=read, stdout=file)
    os.close(read)
    copied("seq 300000", "true", stdout=write)
    os.close(write)
    assert reader.wait() == 0
    assert path.read_bytes() == b"".join(b"%d\n" % number for number in range(1, 300001))


def test_no_longer_than_its_patience_for_what_holds_the_pipes(copied, tmp_path):
    out, _, _ = copied(f"echo a; sleep 600 & echo $! >{tmp_path}/pid; true", "echo b", patience=0.2)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert out == b"a\n"


def test_a_terminal_gets_a_line_of_its_own(background):
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    script = "printf 50%%; exit 3"
    launch = background("-n", "1", "sh", "-c", script, stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = all_of(ours)
    assert launch.wait() == 3
    assert text.startswith(b"ezpz-launch: 1 rank on ")
    assert b"\n50%\nezpz-launch: rank 0 on " in text


def test_a_head_ends_the_launch(background):
    launch = background("-n", "1", "--grace", "5", "yes", stdout=-1, stderr=-1)
    assert launch.stdout.readline() == b"y\n"
    launch.stdout.close()
    assert launch.wait() == 128 + signal.SIGPIPE


@pytest.fixture
def full():
    """The end of a pipe that is full, and that nobody reads."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x")
    os.set_blocking(write, True)
    yield write
    os.close(read)
    os.close(write)


def test_where_nobody_reads_a_signal_ends_the_launch(background, until, tmp_path, full):
    script = (
        f"trap 'echo bye >{tmp_path}/bye-$RANK; exit 9' TERM; "
        f"sleep 600 & touch {tmp_path}/started-$RANK; wait"
    )
    launch = background("-n", "2", "sh", "-c", script, stderr=full)
    until(lambda: len(list(tmp_path.glob("started-*"))) == 2)
    launch.terminate()
    assert launch.wait() == 143
    assert len(list(tmp_path.glob("bye-*"))) == 2
