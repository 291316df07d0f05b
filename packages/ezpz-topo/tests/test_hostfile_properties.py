"""Whatever a hostfile holds: an answer or a HostfileError, and what is written is read again."""

import os
import random
import string

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from ezpz_topo import (
    HostfileError,
    get_nodes_from_hostfile,
    parse_hostfile,
    read_hostfile,
    same_host,
    short_name,
    write_hostfile_from_list_of_hosts,
)
from ezpz_topo._hostfile import parse_bytes
from ezpz_topo._hosts import host_key, is_host

# Not even its caches go into the working directory.
set_hypothesis_home_dir(os.devnull)
QUIET = settings(
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

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


@QUIET
@given(ANY_TEXT)
def test_parsing_answers_or_raises_hostfile_error(text):
    try:
        entries = parse_hostfile(text)
    except HostfileError:
        return
    assert entries
    assert all(is_host(entry.host) for entry in entries)
    assert all(entry.slots is None or entry.slots > 0 for entry in entries)
    assert len({host_key(entry.host) for entry in entries}) == len(entries)


@QUIET
@given(st.lists(HOSTS, min_size=1, max_size=20, unique_by=host_key))
def test_what_is_written_is_read_again(tmp_path, hosts):
    path = write_hostfile_from_list_of_hosts(hosts, tmp_path / "hosts")
    assert get_nodes_from_hostfile(path) == hosts
    assert all(entry.slots is None for entry in read_hostfile(path))


@QUIET
@given(st.lists(st.tuples(HOSTS, st.integers(1, 9)), min_size=1, max_size=20), st.randoms())
def test_slots_are_the_sum_whatever_the_form(lines, rng):
    forms = ("{} {}", "{} slots={}", "{}  slots = {} max_slots=999 # {}", "\t{} cpu={}\r")
    text = "\n".join(rng.choice(forms).format(host, n, n) for host, n in lines)
    expected: dict[str, int] = {}
    for host, n in lines:
        expected[host_key(host)] = expected.get(host_key(host), 0) + n
    found = {host_key(entry.host): entry.slots for entry in parse_hostfile(text)}
    assert found == expected
    assert list(found) == list(expected)


@QUIET
@given(st.lists(NAMES, min_size=1, max_size=20))
def test_a_node_file_counts_its_lines(names):
    found = {host_key(entry.host): entry.slots or 1 for entry in parse_hostfile("\n".join(names))}
    keys = [host_key(name) for name in names]
    assert found == {key: keys.count(key) for key in keys}


@QUIET
@given(HOSTS, HOSTS)
def test_same_host_holds_together(a, b):
    assert same_host(a, a)
    assert same_host(a, a.upper())
    assert same_host(a, short_name(a))
    assert same_host(a, b) == same_host(b, a)


@QUIET
@given(ANY_TEXT)
def test_names_may_be_anything(text):
    short_name(text)
    same_host(text, "x1n0")
    if is_host(text):
        assert parse_hostfile(text)[0].host == text


def test_random_bytes_never_crash_nor_hang(tmp_path):
    """100,000 byte strings: half of them anything, half like hostfiles; some as real files."""
    rng = random.Random(20_240_607)
    like = (string.ascii_lowercase[:4] + "019.:=#[]-, \t\n\n\r").encode() + b"\xff\0"
    refused, path = 0, tmp_path / "hosts"
    for number in range(100_000):
        length = rng.randrange(40)
        data = rng.randbytes(length) if number % 2 else bytes(rng.choices(like[:-2], k=length))
        if not number % 7:
            data += bytes(rng.choices(like, k=3))
        try:
            if number % 50:
                parse_bytes(data, "<bytes>")
            else:
                path.write_bytes(data)
                read_hostfile(path)
        except UnicodeDecodeError:
            assert number % 50  # reading turns it into ours
            refused += 1
        except HostfileError:
            refused += 1
    assert 0 < refused < 100_000


@given(st.text(alphabet="aB9_.-\n#: ", max_size=60))
@QUIET
def test_what_is_seen_at_a_glance_is_what_line_by_line_gives(text):
    """A file of plain names takes a shorter way, to the same answer."""

    def outcome(parse):
        try:
            return parse()
        except HostfileError as error:
            return str(error)

    by_line = outcome(lambda: parse_hostfile(text, path="x"))
    at_a_glance = outcome(lambda: parse_bytes(text.encode(), "x"))
    if not isinstance(by_line, str):
        by_line = {entry.host: entry.slots for entry in by_line}
    assert at_a_glance == by_line
