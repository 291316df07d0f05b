"""What a hostfile says: every form, and everything that is none; which files are read."""

import os

import pytest

from ezpz_topo import (
    HostfileError,
    HostSlots,
    get_nodes_from_hostfile,
    parse_hostfile,
    read_hostfile,
)
from ezpz_topo._hostfile import MAX_BYTES, parse_bytes


def pairs(text):
    return [(entry.host, entry.slots) for entry in parse_hostfile(text)]


# What a line may be.


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x1n0", ("x1n0", None)),
        ("x1n0.hsn.site.gov", ("x1n0.hsn.site.gov", None)),
        ("x1n0:4", ("x1n0", 4)),
        ("x1n0 4", ("x1n0", 4)),
        ("x1n0 slots=4", ("x1n0", 4)),
        ("x1n0 slots = 4", ("x1n0", 4)),
        ("x1n0 slots =4 max_slots= 8", ("x1n0", 4)),
        ("x1n0 max-slots=8 slots=4", ("x1n0", 4)),
        ("x1n0:4 max_slots=8", ("x1n0", 4)),
        ("x1n0 4 slots_max=4", ("x1n0", 4)),
        ("x1n0 max_slots=8", ("x1n0", 8)),
        ("x1n0 cpu=4", ("x1n0", 4)),
        ("x1n0 count=4", ("x1n0", 4)),
        ("x1n0 slots=004", ("x1n0", 4)),
        ("x1n0 slots=999999", ("x1n0", 999999)),
        ("\t x1n0\t\tslots=4 \t", ("x1n0", 4)),
        ("x1n0 # the login node", ("x1n0", None)),
        ("x1n0:4# four", ("x1n0", 4)),
        ("x1n0 slots=4\r", ("x1n0", 4)),
        ("10.0.0.1", ("10.0.0.1", None)),
        ("10.0.0.1:4", ("10.0.0.1", 4)),
        ("::1", ("::1", None)),
        ("::1:2", ("::1:2", None)),  # an address to the end: slots need brackets
        ("::1 slots=2", ("::1", 2)),
        ("[::1]", ("::1", None)),
        ("[::1]:2", ("::1", 2)),
        ("[::1] 2", ("::1", 2)),
    ],
)
def test_one_line(line, expected):
    assert pairs(line) == [expected]
    assert pairs(f"# hosts\n\n{line}\n   # indented\n\n") == [expected]


def test_blank_lines_comments_and_line_ends():
    assert pairs("\ufeff# top\r\n\r\n\t\r\nx1n0\r\nx1n1") == [("x1n0", None), ("x1n1", None)]


def test_a_node_file_has_a_line_per_slot():
    text = "x1n0.site.gov\nx1n0.site.gov\nx1n1.site.gov\nx1n1.site.gov\n"
    assert pairs(text) == [("x1n0.site.gov", 2), ("x1n1.site.gov", 2)]


def test_lines_that_are_not_grouped():
    assert pairs("b\na\nb\na\nb\n") == [("b", 3), ("a", 2)]


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("h:2\nh:2", 4),
        ("h slots=2\nh", 3),
        ("h\nh:4", 5),
        ("h\nh\nh", 3),
        ("h 2\nh max_slots=3", 5),
    ],
)
def test_repeats_add_up(text, slots):
    assert pairs(text) == [("h", slots)]


def test_names_are_compared_short_and_the_first_spelling_stays():
    text = "X1n0:2\nx1n1\nx1n0.hsn.example:2\nx1n1.site.gov\nx1n10\n"
    assert pairs(text) == [("X1n0", 4), ("x1n1", 2), ("x1n10", None)]


def test_addresses_are_compared_whole():
    text = "10.0.0.1\n10.0.0.2\n::1\n::2\n[0:0::1]:3\n"
    assert pairs(text) == [("10.0.0.1", None), ("10.0.0.2", None), ("::1", 4), ("::2", None)]


# What a line may not be.


@pytest.mark.parametrize(
    ("line", "part", "expected"),
    [
        ("nid[001-004]", "nid[001-004]", "ezpz-topo expand"),
        ("nid[1-2]:4 slots=2", "nid[1-2]:4", "ezpz-topo expand"),
        ("[1-3]", "[1-3]", "ezpz-topo expand"),
        ("nid[1", "nid[1", "ezpz-topo expand"),
        ("a,b", "a,b", "one host a line"),
        ("a, slots=2", "a,", "one host a line"),
        ("me@a", "me@a", "~/.ssh/config"),
        ("-oProxyCommand=x", "-oProxyCommand=x", "host:n"),
        ("--np 4", "--np", "host:n"),
        ("^a", "^a", "host:n"),
        ("+n1", "+n1", "host:n"),
        ("//a", "//a", "host:n"),
        ('"a"', '"a"', "host:n"),
        ("héte", "héte", "host:n"),
        ("a\xa0b", r"a\xa0b", "host:n"),
        ("a\x1bb", r"a\x1bb", "host:n"),
        ("a\rb", r"a\rb", "host:n"),
        ("12", "12", "host:n"),
        ("10.0.0", "10.0.0", "host:n"),
        ("10.0.0.256", "10.0.0.256", "host:n"),
        ("::1%eth0", "::1%eth0", "host:n"),
        ("a:2:3", "a:2:3", "host:n"),
        ("slots=4", "slots=4", "host:n"),
        ("=", "=", "host:n"),
        (":4", ":4", "host:n"),
        ("a:", "a:", "slots from 1"),
        ("a:x", "a:x", "slots from 1"),
        ("a:0", "a:0", "slots from 1"),
        ("a:-1", "a:-1", "slots from 1"),
        ("a:٣", "a:٣", "slots from 1"),
        ("[::1]:", "[::1]:", "slots from 1"),
        ("a 0", "0", "slots from 1"),
        ("a b", "b", "slots from 1"),
        ("a slots=", "slots=", "slots from 1"),
        ("a slots==4", "slots==4", "each once"),
        ("a slots=4.0", "slots=4.0", "slots from 1"),
        ("a slots=1000000", "slots=1000000", "slots from 1"),
        ("a slots=" + "9" * 3000, "slots=9", "slots from 1"),
        ("a max_slots=0", "max_slots=0", "slots from 1"),
        ("a slots=4 max_slots=3", "max_slots=3", "at least the 4"),
        ("a slots=4 slots=4", "slots=4", "each once"),
        ("a:4 slots=4", "slots=4", "each once"),
        ("a 4 4", "4", "each once"),
        ("a max_slots=4 max_slots=4", "max_slots=4", "each once"),
        ("a port=22", "port=22", "each once"),
        ("a user=me", "user=me", "each once"),
        ("a" * 300, "a" * 40, "host:n"),
        ("a " * 4000, "7999 characters", "one host a line"),
    ],
)
def test_errors_tell_file_line_part_and_remedy(line, part, expected):
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(f"# top\nx1n0\n{line}\nx1n1\n", path="/there/hosts")
    message = str(caught.value)
    assert message.startswith("hostfile '/there/hosts' line 3: ")
    assert part in message
    assert expected in message
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize("text", ["", "\n", "# x1n0\n", " \t\r\n", "\ufeff"])
def test_no_host_is_an_error(text):
    with pytest.raises(HostfileError, match="names no host; expected one host a line"):
        parse_hostfile(text)


def test_nul_bytes_are_an_error_even_in_a_comment():
    with pytest.raises(HostfileError, match="NUL"):
        parse_hostfile("x1n0 # \0\n")


def test_too_many_hosts(monkeypatch):
    monkeypatch.setattr("ezpz_topo._hostfile.MAX_HOSTS", 3)
    assert len(parse_hostfile("a\nb\nc\na\n")) == 3
    with pytest.raises(HostfileError, match="'d' is host 4; expected at most 3"):
        parse_hostfile("a\nb\nc\nd\n")


def test_too_many_lines():
    with pytest.raises(HostfileError, match="more than 4194304 lines"):
        parse_hostfile("\n" * 5_000_000)


@pytest.mark.parametrize("lines", [b"\n", b"a\n", b"a\nb\n", b"a\na\nb\nb\n"])
def test_too_many_lines_of_names(monkeypatch, lines):
    monkeypatch.setattr("ezpz_topo._hostfile._MAX_LINES", 8)
    if lines != b"\n":
        assert set(parse_bytes(lines * (8 // lines.count(b"\n")), "x")) <= {"a", "b"}
    with pytest.raises(HostfileError, match="more than 8 lines"):
        parse_bytes(lines * 9, "x")


def test_too_many_hosts_of_a_line_a_slot(monkeypatch):
    monkeypatch.setattr("ezpz_topo._hostfile.MAX_HOSTS", 3)
    assert parse_bytes(b"a\na\nb\nc\nc\n", "x") == {"a": 2, "b": None, "c": 2}
    with pytest.raises(HostfileError, match="'d' is host 4; expected at most 3"):
        parse_bytes(b"a\na\nb\nc\nc\nd\n", "x")


def test_an_error_below_repeated_lines_tells_its_line():
    with pytest.raises(HostfileError, match="line 25: 'me@b'"):
        parse_bytes(b"a.site\n" * 24 + b"me@b\n" * 2, "x")
    with pytest.raises(HostfileError, match="NUL"):
        parse_bytes(b"a\na\nb\0\n", "x")
    with pytest.raises(UnicodeDecodeError, match="position 4"):
        parse_bytes(b"a\na\n\xff\n", "x")


def test_a_long_line_after_many_short_ones_is_not_repeated():
    text = b"a\n" * 100_000 + b"#" * 30_000_000 + b"\n"
    assert parse_bytes(text, "x") == {"a": 100_000}


@pytest.mark.parametrize("length", [253, 254, 255])
def test_the_longest_name(length):
    name = "a." * 126 + "b" * (length - 252)
    data = f"{name}\n".encode() * 2
    if length < 255:
        assert parse_bytes(data, "x") == {name: 2}
        return
    with pytest.raises(HostfileError, match="line 1: "):
        parse_bytes(data, "x")


def test_a_long_line_costs_no_more_than_a_short_one_each():
    # a regular expression that tried every blank, or every label, would not end
    for line in (" " * 1_000_000, "a." * 1_000_000, "=" * 1_000_000, "[" * 1_000_000):
        with pytest.raises(HostfileError):
            parse_hostfile(line)


# Which files are read.


def test_reading(tmp_path):
    path = tmp_path / "40[1].pbs-0001"
    path.write_bytes(b"\xef\xbb\xbfx1n0.site.gov\r\nx1n0.site.gov\r\nx1n1.site.gov\r\n")
    entries = (HostSlots("x1n0.site.gov", 2), HostSlots("x1n1.site.gov", None))
    assert read_hostfile(path) == read_hostfile(str(path)) == entries
    assert get_nodes_from_hostfile(path) == ["x1n0.site.gov", "x1n1.site.gov"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "hosts").write_text("a\n")
    (tmp_path / "link").symlink_to("hosts")
    assert get_nodes_from_hostfile(tmp_path / "link") == ["a"]


@pytest.mark.parametrize(
    ("name", "match"),
    [("absent", "No such file"), (".", "Is a directory"), ("", "No such file"), ("a\0b", "null")],
)
def test_a_file_that_cannot_be_read(tmp_path, monkeypatch, name, match):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HostfileError, match=f"cannot be read .*{match}.*; expected .*; name"):
        read_hostfile(name)


@pytest.fixture
def unreadable(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("a\n")
    path.chmod(0)
    return path


def test_a_file_without_permission(unreadable, unprivileged):
    with pytest.raises(HostfileError, match="Permission denied"):
        read_hostfile(unreadable)


def test_only_regular_files_are_read(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, "/dev/zero", "/dev/null"):
        with pytest.raises(HostfileError, match="is not a regular file"):
            read_hostfile(path)


def test_a_directory_leaves_no_descriptor_open(tmp_path):
    before = os.listdir("/dev/fd")
    for _ in range(3):
        with pytest.raises(HostfileError):
            read_hostfile(tmp_path)
    assert len(os.listdir("/dev/fd")) == len(before)


@pytest.mark.parametrize("content", [b"a\xff\n", b"\xff\xfea\0\n\0", b"\x80", b"caf\xe9 # x"])
def test_bytes_that_are_no_text(tmp_path, content):
    path = tmp_path / "hosts"
    path.write_bytes(content)
    with pytest.raises(HostfileError, match=r"cannot be read .*decode"):
        read_hostfile(path)


def test_binary_that_decodes(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"a\0b\n")
    with pytest.raises(HostfileError, match="NUL"):
        read_hostfile(path)


def test_a_huge_file_is_refused(tmp_path):
    path = tmp_path / "hosts"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # sparse: it takes no room
    with pytest.raises(HostfileError, match=f"more than {MAX_BYTES} bytes"):
        read_hostfile(path)
