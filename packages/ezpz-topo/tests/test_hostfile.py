"""What a hostfile says: every form, and everything that is none; which files are read."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ezpz_topo import (
    HostfileError,
    HostSlots,
    get_nodes_from_hostfile,
    read_hostfile,
    write_hostfile_from_list_of_hosts,
)
from ezpz_topo._hostfile import MAX_BYTES, parse_slots
from ezpz_topo._nodelist import host_key, is_host


def pairs(text, path="<text>"):
    return list(parse_slots(text, path).items())


LINES = {
    ("x1n0", None): ["x1n0", "x1n0 # the login node"],
    ("x1n0.hsn.site.gov", None): ["x1n0.hsn.site.gov"],
    ("x1n0", 4): [
        "x1n0:4", "x1n0 4", "x1n0 slots =4 max_slots= 8", "x1n0 max-slots=8 slots=4",
        "x1n0:4 max_slots=8", "x1n0 4 slots_max=4", "x1n0 cpu=4", "x1n0 count=4",
        "\t x1n0\t\tslots=004 \t", "x1n0:4# four", "x1n0 slots=4\r",
    ],
    ("x1n0", 8): ["x1n0 max_slots=8"],
    ("10.0.0.1", 4): ["10.0.0.1:4"],
    ("::1", None): ["::1", "[::1]"],
    ("::1:2", None): ["::1:2"],  # an address to the end: slots need brackets
    ("::1", 2): ["::1 slots=2", "[::1]:2", "[::1] 2"],
    ("a." * 126 + "bb", 3): ["a." * 126 + "bb:3"],  # the longest name
}  # fmt: skip


@pytest.mark.parametrize(("expected", "lines"), LINES.items())
def test_one_line(lines, expected):
    for line in lines:
        assert pairs(line) == [expected], line
        assert pairs(f"# hosts\n\n{line}\n   # indented\n\n") == [expected]


@pytest.mark.parametrize(("text", "expected"), [
    ("\ufeff# top\r\n\r\n\t\r\nx1n0\r\nx1n1", [("x1n0", None), ("x1n1", None)]),
    # A PBS node file has a line for each slot.
    ("x0.gov\nx0.gov\nx1.gov\nx1.gov\n", [("x0.gov", 2), ("x1.gov", 2)]),
    ("b\na\nb\na\nb\n", [("b", 3), ("a", 2)]),
    ("h slots=2\nh\nh max_slots=3\nh.gov:2\nh.gov:2", [("h", 10)]),
    # Names are compared short, and the first spelling stays.
    ("X1n0:2\nx1\nx1n0.hsn.example:2\nx1.site\nx10", [("X1n0", 4), ("x1", 2), ("x10", None)]),
    # Addresses are compared whole.
    ("::1\n::2\n[0:0::1]:3", [("::1", 4), ("::2", None)]),
    ("a\n" * 100_000 + "#" * 30_000_000 + "\n", [("a", 100_000)]),
], ids=range(7))  # fmt: skip
def test_several_lines(text, expected):
    assert pairs(text) == expected


# What is expected, and lines in which a part is not so, after what is in order.
WRONG = {
    "ezpz-topo expand": ["nid[001-004]", "nid[1-2]:4", "[1-3]", "nid[1"],
    "one host a line": ["a,b", "a,", "a " * 4000],
    "~/.ssh/config": ["me@a"],
    "host:n": [
        "-oProxyCommand=x", '"a"', "héte", "a\x1bb", "a\rb", "12", "::1%eth0", "a:2:3", "slots=4",
        ":4", "a." * 126 + "bbb",
    ],
    "slots from 1": [
        "a:", "a:0", "a:-1", "a:٣", "[::1]:", "a |0", "a |b", "a |slots=4.0", "a |slots=1000000",
        "a |slots=" + "9" * 3000, "a |max_slots=0",
    ],
    "at least the 4": ["a slots=4 |max_slots=3"],
    "each once": [
        "a |slots==4", "a slots=4 |slots=4", "a:4 |slots=4", "a 4 |4", "a |port=22",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "expected"), [(line, expected) for expected in WRONG for line in WRONG[expected]]
)
def test_errors_tell_file_line_part_and_remedy(line, expected):
    part = line.rpartition("|")[2]
    line = line.replace("|", "")
    with pytest.raises(HostfileError) as caught:
        pairs(f"# top\nx1n0\n{line}\nx1n1\n{line}\n", "/there/hosts")
    message = str(caught.value)
    assert message.startswith("hostfile '/there/hosts' line 3: ")
    assert repr(part[:40]) in message or "7999 characters" in message
    assert expected in message
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize(("text", "message"), [
    *((text, "names no host; expected") for text in ("", "\n", "# x\n", " \t\r\n", "\ufeff")),
    ("x1n0 # \0\n", "NUL"),
    ("\n" * 5_000_000, "more than 4194304 lines"),
    ("a\nb\nb\nc\nd\n", "'d' is host 4; expected at most 3"),
    # A regular expression that tried every blank, or every label, would not end.
    *((char * 1_000_000, "expected (one )?host") for char in (" ", "a.", "=", "[")),
], ids=range(12))  # fmt: skip
def test_no_hostfile(monkeypatch, text, message):
    monkeypatch.setattr("ezpz_topo._hostfile.MAX_HOSTS", 3)
    with pytest.raises(HostfileError, match=message):
        pairs(text)


# Which files are read.


def test_reading(tmp_path):
    path = tmp_path / "40[1].pbs-0001"
    path.write_bytes(b"\xef\xbb\xbfx1n0.site.gov\r\nx1n0.site.gov\r\nx1n1.site.gov\r\n")
    (tmp_path / "link").symlink_to(path)
    entries = (HostSlots("x1n0.site.gov", 2), HostSlots("x1n1.site.gov", None))
    assert read_hostfile(path) == read_hostfile(str(path)) == entries
    assert get_nodes_from_hostfile(tmp_path / "link") == ["x1n0.site.gov", "x1n1.site.gov"]


@pytest.mark.parametrize(
    ("name", "match"),
    [("absent", "No such file"), (".", "Is a directory"), ("", "No such file"), ("a\0b", "null"),
     ("fifo", "is not a regular file"), ("/dev/zero", "is not a regular file"),
     ("/dev/null", "is not a regular file"), ("huge", f"more than {MAX_BYTES} bytes")],
)  # fmt: skip
def test_a_file_that_cannot_be_read(tmp_path, monkeypatch, name, match):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    with open("huge", "wb") as file:
        file.truncate(MAX_BYTES + 1)  # sparse: it takes no room
    before = os.listdir("/dev/fd")
    with pytest.raises(HostfileError, match=f"cannot be read .*{match}.*; expected .*; name"):
        read_hostfile(name)
    assert len(os.listdir("/dev/fd")) == len(before)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"caf\xe9 # x")
    with pytest.raises(HostfileError, match=r"cannot be read .*decode"):
        read_hostfile(path)


# Whatever a hostfile holds: an answer or a HostfileError, and what is written is read again.

WORDS = ["x1n0", "x1n0.hsn", "X1N1", "10.0.0.1", "::1", "[::1]", "n[1-3]", "slots", "max_slots",
         "cpu", "=", ":", "0", "2", "17", "#", "@", ",", "-", ".", " ", "\t", "\n", "\r\n", "\0",
         "\ufeff", "\x1c", "\u2028", "\xa0"]  # fmt: skip
ANY_TEXT = st.one_of(
    st.text(max_size=200), st.lists(st.sampled_from(WORDS), max_size=30).map("".join)
)
LABELS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=3).map(".".join)
ADDRESSES = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
HOSTS = st.one_of(NAMES, ADDRESSES).filter(is_host)


@given(ANY_TEXT)
def test_parsing_answers_or_raises_hostfile_error(text):
    if is_host(text):
        assert pairs(text)[0][0] == text
    try:
        found = pairs(text)
    except HostfileError:
        return
    assert found
    assert all(is_host(host) for host, _ in found)
    assert all(slots is None or slots > 0 for _, slots in found)
    assert len({host_key(host) for host, _ in found}) == len(found)


@given(st.lists(HOSTS, min_size=1, max_size=20, unique_by=host_key))
def test_what_is_written_is_read_again(tmp_path, hosts):
    path = write_hostfile_from_list_of_hosts(hosts, tmp_path / "hosts")
    assert read_hostfile(path) == tuple(map(HostSlots, hosts))
