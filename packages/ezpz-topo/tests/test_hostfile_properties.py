"""Whatever a hostfile holds: an answer or a HostfileError, and what is written is read again."""

import os
import random
import string
from collections import Counter

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
from ezpz_topo._hostfile import _count_runs, parse_bytes, parse_text
from ezpz_topo._nodelist import host_key, is_host

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


def outcome(parse):
    try:
        return list(parse().items())
    except HostfileError as error:
        return str(error)


def outcome_of_bytes(data):
    return outcome(lambda: parse_bytes(data, "x"))


def outcome_by_line(data):
    return outcome(lambda: parse_text(data.decode(), "x"))


@given(st.text(alphabet="aB9_.-\n#: ", max_size=60))
@QUIET
def test_what_is_seen_at_a_glance_is_what_line_by_line_gives(text):
    """A file of plain names takes a shorter way, to the same answer."""
    assert outcome_of_bytes(text.encode()) == outcome_by_line(text.encode())


BLOCKS = st.lists(
    st.tuples(st.sampled_from(["a", "A", "ab", "a.s", "b.s", "1n", "", "c:2", "#", "d.-"]),
              st.integers(1, 5)),
    max_size=12,
)  # fmt: skip


@given(BLOCKS, st.sampled_from(["", "\n"]))
@QUIET
def test_runs_of_a_line_count_as_its_lines_do(blocks, last):
    """Also where runs differ in length, come back, touch, or end without a line end."""
    lines = [line for line, times in blocks for _ in range(times)]
    data = ("\n".join(lines) + last).encode()
    expected = Counter(line.encode() + b"\n" for line in lines if line)
    runs = _count_runs(data)
    if runs is not None:
        assert list(runs.items()) == list(expected.items())
    repeated = len(lines) > 1 and lines[0] == lines[1] and (len(lines) > 2 or bool(last))
    assert (runs is not None) == repeated
    assert outcome_of_bytes(data) == outcome_by_line(data)


@given(st.lists(st.tuples(st.from_regex(r"[a-zA-Z0-9][a-z0-9-]{0,2}(\.[a-z]{1,2}){0,2}\.?",
                                        fullmatch=True), st.integers(1, 4)), max_size=30),
       st.sampled_from(["", "\n"]), st.booleans())  # fmt: skip
@QUIET
def test_node_files_at_a_glance_and_by_line(blocks, last, in_turn):
    """Names that repeat, at once or later, in one spelling or in several."""
    lines = [name for name, times in blocks for _ in range(times)]
    lines = lines[::3] + lines[1::3] if in_turn else lines
    data = ("\n".join(lines) + last).encode()
    assert outcome_of_bytes(data) == outcome_by_line(data)
