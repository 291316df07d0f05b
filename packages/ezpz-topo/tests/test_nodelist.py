"""Names of hosts, and Slurm's nodelists; what scontrol itself says is compared in tests/slurm."""

import socket
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ezpz_topo import (
    InvalidVariableError,
    NodelistError,
    expand_nodelist,
    first_host,
    fold_nodelist,
    get_hostname,
    is_own_address,
    same_host,
    short_name,
)
from ezpz_topo._nodelist import find_host, get_tasks_on_node, is_host

# Names of hosts: short ones, the same one, and what is none.


@pytest.mark.parametrize(("host", "short"), [
    ("x1000c0s0b0n0.hsn.cm.aurora.alcf.anl.gov", "x1000c0s0b0n0"),
    ("nid001", "nid001"),
    ("nid001.", "nid001"),
    ("10.example", "10"),
    # the first number of an address is no name
    ("10.0.0.1", "10.0.0.1"),
    ("::1", "::1"),
    ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
])  # fmt: skip
def test_short_name(host, short):
    assert short_name(host) == short
    assert same_host(host, short)


@pytest.mark.parametrize(("one", "other", "same"), [
    ("x1n0.hsn.site.gov", "x1n0.site.gov", True),
    ("X1N0", "x1n0.", True),
    ("FE80::1", "fe80:0:0::1", True),
    ("[::1]", "::1", True),
    ("x1n0", "x1n01", False),
    ("10.0.0.1", "10.0.0.2", False),
    ("10.0.0.1", "10", False),
    ("::ffff:10.0.0.1", "10.0.0.1", True),
    ("localhost", "x1n0", False),  # nothing is looked up
    ("localhost", "127.example", False),
    ("localhost", "localhost-1", False),
    *(("localhost", name, True) for name in (
        "127.255.0.3", "0.0.0.0", "[0:0::1]", "::", "::ffff:127.0.0.1", "LOCALHOST.localdomain",
        "localhost6.localdomain6", "ip6-loopback", "ipv6-localhost", "a.localhost.")),
])  # fmt: skip
def test_same_host(one, other, same):
    assert same_host(one, other) == same_host(other, one) == same
    assert find_host(one, ["a", other, "b"]) == (other if same else None)


NAMES = ["a", "n-1", "my_host", "1e3", "x1n0.site.", "255.1.2.3", "::ffff:1.2.3.4", "a" * 254]
NO_NAMES = ["", ".", "--np=2", "a b", "a,b", "a\0", "a\n", "a.b..c", "a.-b", "n[1-2]", "h:2", "u@h",
            "$(a)", "12", "1.2.3.4.5", "10.0.0.256", "010.0.0.1", "10.0.0.1.", "0x7f.1",
            "127.0.0.0X1", "٣", "é", "a\xa0b", "::1%eth0", "::1/64", "g::1", "a" * 255]  # fmt: skip


@pytest.mark.parametrize("host", NAMES + NO_NAMES)
def test_is_host(host):
    assert is_host(host) == (host in NAMES)


def find_address(family, elsewhere):
    """Return an address of this host by which it would reach another; None if it has none."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((elsewhere, 9))  # sends nothing
        return probe.getsockname()[0]
    return None


def test_is_own_address():
    own = [
        find_address(socket.AF_INET, "203.0.113.9"), find_address(socket.AF_INET6, "2001:db8::9"),
    ]  # fmt: skip
    for address in (*filter(None, own), "127.0.0.1", "127.0.1.1"):
        assert is_own_address(address), address
    for host in ("203.0.113.9", "2001:db8::9", get_hostname(), "localhost", "0x7f.1", "", "::1%lo"):
        assert not is_own_address(host), host


# Slurm's nodelists.

# Printed by scontrol show hostnames, Slurm 22.05.8, but for the last two (from 23.02.5).
SAID_BY_SLURM = {
    "nid001": ["nid001"],
    "n[01-03,9]": ["n01", "n02", "n03", "n9"],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[001-2]": ["n001", "n002"],
    "n[1,1]": ["n1", "n1"],
    "a,, b": ["a", "b"],
    "n[1-2],": ["n1", "n2"],
    ",": [],
    "a[1-2]b[1-3]": ["a1b1", "a1b2", "a1b3", "a2b1", "a2b2", "a2b3"],
    "a[1-2]b[1-2]c[1-2]d[1-2]": [
        "a1b1c1d1", "a1b1c1d2", "a2b1c1d1", "a2b1c1d2", "a1b2c1d1", "a1b2c1d2", "a2b2c1d1",
        "a2b2c1d2", "a1b1c2d1", "a1b1c2d2", "a2b1c2d1", "a2b1c2d2", "a1b2c2d1", "a1b2c2d2",
        "a2b2c2d1", "a2b2c2d2",
    ],
    "n[1-2]-ib": ["n1-ib", "n2-ib"],
    "n[1-2]x,m": ["n1x", "n2x", "m"],
}  # fmt: skip


@pytest.mark.parametrize(("nodelist", "hosts"), SAID_BY_SLURM.items())
def test_as_slurm_does(nodelist, hosts):
    assert expand_nodelist(nodelist) == hosts
    if hosts:
        assert first_host(nodelist) == hosts[0]


@pytest.mark.parametrize(
    ("nodelist", "part"),
    [("n[3-1]", "'3-1'"), ("n[]", "''"), ("a,n[1-2", r"position 3.*is not closed"),
     ("n[[1]]", r"position 1.*is not closed, or holds another"),
     ("n]", r"position 1.*was not opened"), ("n[1]]", r"position 4.*was not opened"),
     ("n[0x1-0x3]", "'0x1-0x3'"), ("n[1-5/2]", "'1-5/2'"), ("n[-1]", "'-1'"), ("n[1-]", "'1-'"),
     ("n[1-2-3]", "'1-2-3'"), ("n[ 1-2]", "' 1-2'"), ("n[1,,2]", "''"), ("n[٣]", "'٣'"),
     ("n[1-" + "9" * 5000 + "]", "is no range")],
)  # fmt: skip
def test_what_does_not_parse_is_named(nodelist, part):
    for read in (expand_nodelist, first_host):
        if nodelist.startswith("a,") and read is first_host:
            continue  # its first name is in order
        with pytest.raises(NodelistError, match=part):
            read(nodelist)


@pytest.mark.parametrize(
    "nodelist",
    ["n[1-100000000]", "n[0-999999999999999]", "n[1-1000][1-1000][1-1000]", "[1-9]" * 40,
     ",".join(["n[1-1000000]"] * 20), "n[" + ",".join(["1-1000000"] * 20) + "]",
     "a,b,n[1-100000000],c"],
)  # fmt: skip
def test_a_hostile_list_is_refused_without_making_it(nodelist):
    tracemalloc.start()
    try:
        with pytest.raises(NodelistError, match="expected at most"):
            expand_nodelist(nodelist, max_hosts=100_000)
        assert not nodelist.startswith("n[0-") or first_host(nodelist) == "n0"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_the_largest_machine_and_one_too_large():
    hosts = expand_nodelist("x[4000-4839]c[0-2]n[0-3]")
    assert len(hosts) == len(set(hosts)) == 10_080
    # A product that cannot be printed.
    with pytest.raises(NodelistError, match="expected at most 1048576"):
        expand_nodelist("n[1-2]" * 20_000)
    assert first_host("n[1-2]" * 20_000) == "n1" * 20_000
    with pytest.raises(NodelistError, match="names no host"):
        first_host(" , ")
    with pytest.raises(NodelistError, match="3 hosts or more; expected at most 2"):
        expand_nodelist("a,b,c", max_hosts=2)


@pytest.mark.parametrize(("hosts", "folded"), [
    ([], ""),
    (["a"], "a"),
    (["n1"], "n1"),
    (["n9", "n10", "n11"], "n[9-11]"),
    (["n09", "n10", "n11"], "n[09-11]"),
    (["n1", "n02"], "n[1,02]"),
    (["n2", "n1"], "n[2,1]"),
    (["n1", "n1"], "n[1,1]"),
    (["n1", "m1", "n2"], "n1,m1,n2"),
    (["x1c0", "x1c1", "x2c0"], "x1c[0-1],x2c0"),
    (["n1-ib", "n2-ib"], "n1-ib,n2-ib"),
    # A name without a number is not folded with its neighbour.
    (["n00", "n"], "n00,n"),
    (["n", "n0", "n1"], "n,n[0-1]"),
])  # fmt: skip
def test_fold(hosts, folded):
    assert fold_nodelist(hosts) == folded
    assert expand_nodelist(folded) == hosts


@pytest.mark.parametrize("host", ["", "a,b", "n[1]", "a b", "a\n"])
def test_what_is_no_host_name(host):
    with pytest.raises(NodelistError, match="expected one without commas"):
        fold_nodelist(["ok1", host])


# Whatever a nodelist holds: the hosts or a NodelistError, and back again.

ANY_TEXT = st.one_of(st.text(max_size=100), st.text("[]-,0123456789abc \t", max_size=60))


@given(ANY_TEXT)
def test_expanding_answers_or_raises_nodelist_error(text):
    short_name(text)
    same_host(text, "x1n0")
    try:
        hosts = expand_nodelist(text, max_hosts=1000)
    except NodelistError:
        return
    assert not any(set(host) & set("[], \t") for host in hosts)
    assert not hosts or hosts[0] == first_host(text)


@given(
    st.lists(st.one_of(ANY_TEXT, st.from_regex("(n|a-|7)[0-9]{0,3}", fullmatch=True)), max_size=20)
)
def test_folding_answers_or_raises_nodelist_error(hosts):
    try:
        nodelist = fold_nodelist(hosts)
    except NodelistError:
        return
    assert expand_nodelist(nodelist) == hosts


# Slurm's task counts.


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x3),1", [1, 2, 2, 2, 1]), ("12(x10080)", [12] * 5)],
)
def test_task_counts_in_order(text, counts):
    assert [get_tasks_on_node(text, node, variable="V") for node in range(len(counts))] == counts


@pytest.mark.parametrize("text", ["", "x", "4(x2", "4(2)", "4,,3", "4 ", "-1", "4(x2)3", "4(x2),3"])
def test_task_counts_that_are_refused_with_the_variable(text):
    what = "tells of 3 nodes; expected more than 9" if text == "4(x2),3" else "SLURM_V="
    with pytest.raises(InvalidVariableError, match=what):
        get_tasks_on_node(text, 9, variable="SLURM_V")
