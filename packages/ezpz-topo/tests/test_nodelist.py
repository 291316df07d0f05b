"""Slurm's nodelists; what scontrol itself says is compared in tests/slurm."""

import random

import pytest

from ezpz_topo import NodelistError, TopoError, expand_nodelist, first_host, fold_nodelist

# Printed by scontrol show hostnames, Slurm 22.05.8, but for the last two (from 23.02.5).
SAID_BY_SLURM = {
    "nid001": ["nid001"],
    "n[01-03,9]": ["n01", "n02", "n03", "n9"],
    "n[9-11]": ["n9", "n10", "n11"],
    "n[001-2]": ["n001", "n002"],
    "n[1-002]": ["n1", "n2"],
    "n[1,1]": ["n1", "n1"],
    "n1,n1": ["n1", "n1"],
    "a b": ["a", "b"],
    "a,,b": ["a", "b"],
    "n[1-2],": ["n1", "n2"],
    "": [],
    ",": [],
    "a[1-2]b[1-3]": ["a1b1", "a1b2", "a1b3", "a2b1", "a2b2", "a2b3"],
    "a[1-2]b[1-2]c[1-2]": [
        "a1b1c1", "a1b1c2", "a2b1c1", "a2b1c2", "a1b2c1", "a1b2c2", "a2b2c1", "a2b2c2",
    ],
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
    [
        ("n[3-1]", "'3-1'"),
        ("n[]", "''"),
        ("a,n[1-2", r"position 3.*is not closed"),
        ("n[[1]]", r"position 1.*is not closed, or holds another"),
        ("n]", r"position 1.*was not opened"),
        ("n[1]]", r"position 4.*was not opened"),
        ("n[0x1-0x3]", "'0x1-0x3'"),
        ("n[1-5/2]", "'1-5/2'"),
        ("n[-1]", "'-1'"),
        ("n[1-]", "'1-'"),
        ("n[1-2-3]", "'1-2-3'"),
        ("n[ 1-2]", "' 1-2'"),
        ("n[1,,2]", "''"),
        ("n[٣]", "'٣'"),
        ("n[1-" + "9" * 5000 + "]", "is no range"),
    ],
)
def test_what_does_not_parse_is_named(nodelist, part):
    for read in (expand_nodelist, first_host):
        if nodelist.startswith("a,") and read is first_host:
            continue  # its first name is in order
        with pytest.raises(NodelistError, match=part):
            read(nodelist)


@pytest.mark.parametrize(
    "nodelist", ["n[1-100000000]", "n[1-1000]m[1-1000]o[1-1000]", ",".join(["n[1-1000000]"] * 3)]
)
def test_hostile_sizes_are_refused_before_they_are_made(nodelist):
    with pytest.raises(NodelistError, match="expected at most 1048576"):
        expand_nodelist(nodelist)


@pytest.mark.parametrize("brackets", [10_000, 100_000])
def test_a_product_too_large_to_be_printed_is_refused_all_the_same(brackets):
    with pytest.raises(NodelistError, match="expected at most 1048576"):
        expand_nodelist("n[1-2]" * brackets)
    assert first_host("n[1-2]" * brackets) == "n1" * brackets


def test_so_many_plain_names_are_refused():
    with pytest.raises(NodelistError, match="3 hosts; expected at most 2"):
        expand_nodelist("a,b,c", max_hosts=2)


def test_no_host_at_all():
    with pytest.raises(NodelistError, match="names no host"):
        first_host(" , ")


@pytest.mark.parametrize(
    ("hosts", "folded"),
    [
        ([], ""),
        (["a"], "a"),
        (["n1"], "n1"),
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n09", "n10", "n11"], "n[09-11]"),
        (["n1", "n02"], "n[1,02]"),
        (["n2", "n1"], "n[2,1]"),
        (["n1", "n1"], "n[1,1]"),
        (["n1", "m1", "n2"], "n1,m1,n2"),
        (["x1c0", "x1c1", "x2c0"], "x1c[0-1],x2c0"),
        (["n1-ib", "n2-ib"], "n1-ib,n2-ib"),
        (["n99", "n100"], "n[99-100]"),
    ],
)
def test_fold(hosts, folded):
    assert fold_nodelist(hosts) == folded
    assert expand_nodelist(folded) == hosts


@pytest.mark.parametrize("host", ["", "a,b", "n[1]", "a b", "a\n"])
def test_what_is_no_host_name(host):
    with pytest.raises(NodelistError, match="expected one without commas"):
        fold_nodelist(["ok1", host])


def test_folding_and_expanding_are_each_others_inverse():
    draw = random.Random(0)  # the same lists each time
    for _ in range(2000):
        stems = draw.choices(["n", "nid", "x1000c0s", "a-", "login", "7"], k=draw.randint(1, 3))
        hosts = [
            f"{draw.choice(stems)}{draw.randint(0, 130):0{draw.choice((1, 1, 3, 4))}d}"
            for _ in range(draw.randint(0, 12))
        ]
        assert expand_nodelist(fold_nodelist(hosts)) == hosts


def test_whatever_comes_only_our_error_is_raised():
    draw = random.Random(1)
    for _ in range(20_000):
        text = "".join(draw.choices("ab01239-,[] \t\0é٣", k=draw.randint(0, 14)))
        try:
            hosts = expand_nodelist(text, max_hosts=1000)
        except TopoError:
            continue
        assert all(hosts)
        assert len(hosts) <= 1000


def test_the_largest_machine():
    hosts = expand_nodelist("x[4000-4839]c[0-2]n[0-3]")
    assert len(hosts) == len(set(hosts)) == 10_080


def test_a_name_without_a_number_is_not_folded_with_its_neighbour():
    for hosts in (["n00", "n"], ["n", "n0", "n1"], ["n1", "n", "n2"]):
        assert expand_nodelist(fold_nodelist(hosts)) == hosts
