"""What is no report passes through byte for byte, however the stream is cut."""

import os
import random
import time

import pytest

from ezpz_launch._output import Reports

ID = "20260101T000000000001Z-42-abcdef.0"


def copy(what, rank, value, launch_id=ID):
    words = f"{what} {rank} {value}"
    return f"\x1eezpz {launch_id} {words}|{words}\x1f\n".encode()


def twice(*report):
    return copy(*report) * 2


def sifted(*chunks):
    reports, kept, found = Reports(ID), b"", []
    for chunk in chunks:
        more, reported = reports.feed(chunk)
        kept, found = kept + more, found + reported
    return kept + reports.rest(), found


STREAMS = {
    "nothing": (b"", []),
    "a line": (b"a line\n", []),
    "no text at all": (bytes(range(256)), []),
    "separators": (b"\x1e\x1e\x1f\n\x1e \x1f\x1f\n\x1eezpz\x1f\n\x1e", []),
    "another launch": (copy("start", 0, 7, "other.0"), []),
    "the next attempt": (copy("end", 0, 7, ID[:-1] + "10"), []),
    "an id that goes on": (copy("end", 0, 7, ID + "1"), []),
    "the beginning of one": (b"x\x1eezpz " + ID[:10].encode(), []),
    "no report after all": (b"a\x1eezpz " + ID[:10].encode() + b"!\x1f\n", []),
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
    assert sifted(*(stream[i : i + 1] for i in range(len(stream)))) == (data, expected)


def test_every_way_to_cut_it_twice():
    stream = b"a" + copy("end", 0, 1) + b"\x1eb" + copy("start", 0, 1)
    for first in range(len(stream)):
        for second in range(first, len(stream)):
            chunks = (stream[:first], stream[first:second], stream[second:])
            kept, found = sifted(*chunks)
            assert (kept, found) == (b"a\x1eb", [("end", 0, 1), ("start", 0, 1)]), (first, second)


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(b"other\n", id="line"),
        pytest.param(b"\x1e", id="separator"),
        pytest.param(b"\xff\x00", id="bytes"),
        pytest.param(b"x" * 159, id="long"),
        pytest.param(b"x" * 500, id="longer"),
        pytest.param(twice("end", 5, 6), id="another report"),
    ],
)
def test_a_piece_of_another_rank_between(piece):
    """srun and Open MPI cut a stream anywhere: one of the copies is whole, and is heard."""
    own = [("end", 5, 6)] if piece == twice("end", 5, 6) else []
    for cut in range(1, 2 * len(copy("start", 3, 4711))):
        whole = twice("start", 3, 4711)
        kept, found = sifted(whole[:cut] + piece + whole[cut:])
        assert set(found) == {("start", 3, 4711), *own}, cut
        if not own:
            assert piece in kept, cut


@pytest.mark.parametrize("piece", [b"7\n", b"7"])
def test_digits_of_another_rank_between(piece):
    whole = twice("end", 1, 3)
    for cut in range(1, len(whole)):
        _, found = sifted(whole[:cut] + piece + whole[cut:])
        assert set(found) == {("end", 1, 3)}, cut


@pytest.mark.parametrize(
    "words", ["start 1", "start 1 2 3", "start x 2", "start 1 -2", "start 1 2.5", "", "start ² 1"]
)
def test_what_is_damaged_is_no_report(words):
    _, found = sifted(f"\x1eezpz {ID} {words}|{words}\x1f\n".encode())
    assert found == []


def test_little_is_held_back():
    reports = Reports(ID)
    start = f"\x1eezpz {ID} ".encode()
    for chunk in (start, *[b"x" * 7] * 1000, b"\x1e" * 1000, *[start] * 1000):
        reports.feed(chunk)
        assert len(reports._held) < 200


def test_ten_megabytes_of_anything_with_reports_between():
    chance = random.Random(1)
    pieces = [os.urandom(1 << 16) for _ in range(160)]
    stream = b"".join(piece + twice("start", rank, 1) for rank, piece in enumerate(pieces))
    chunks, at = [], 0
    while at < len(stream):
        size = chance.randrange(1, 1 << 16)
        chunks.append(stream[at : at + size])
        at += size
    kept, found = sifted(*chunks)
    assert kept == b"".join(pieces)
    assert found == [("start", rank, 1) for rank in range(160) for _ in range(2)]


def test_a_megabyte_of_separators_is_no_work():
    began = time.process_time()
    chunk = b"\x1e" * (1 << 16)
    assert sifted(*[chunk] * 4) == (chunk * 4, [])
    assert time.process_time() - began < 20
