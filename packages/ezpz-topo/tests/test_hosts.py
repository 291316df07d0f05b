"""Names of hosts: short ones, the same one, and what is none."""

import subprocess

import pytest

from ezpz_topo import get_hostname, same_host, short_name
from ezpz_topo._nodelist import find_host, is_host


def test_hostname_is_what_hostname_prints():
    printed = subprocess.run(["uname", "-n"], capture_output=True, text=True, check=True).stdout
    assert get_hostname() == printed.strip()


@pytest.mark.parametrize(
    ("host", "short"),
    [
        ("x1000c0s0b0n0.hsn.cm.aurora.alcf.anl.gov", "x1000c0s0b0n0"),
        ("nid001", "nid001"),
        ("nid001.", "nid001"),
        ("10.example", "10"),
        # the first number of an address is no name
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "::1"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
    ],
)
def test_short_name(host, short):
    assert short_name(host) == short


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x1n0", "x1n0.site.gov"),
        ("x1n0.hsn.site.gov", "x1n0.site.gov"),
        ("X1N0", "x1n0"),
        ("x1n0.site.gov.", "x1n0"),
        ("10.0.0.1", "10.0.0.1"),
        ("FE80::1", "fe80:0:0::1"),
        ("[::1]", "::1"),
    ],
)
def test_same_host(one, other):
    assert same_host(one, other)
    assert same_host(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x1n0", "x1n01"),
        ("x1n0", "x1n1.site.gov"),
        ("10.0.0.1", "10.0.0.2"),
        ("10.0.0.1", "10"),
        ("::1", "::2"),
        ("localhost", "127.0.0.1"),  # nothing is looked up
    ],
)
def test_other_host(one, other):
    assert not same_host(one, other)
    assert not same_host(other, one)


def test_among():
    assert find_host("x1n1.hsn", ["x1n0.site", "X1N1.site"])
    assert not find_host("x1n2", ["x1n0", "x1n1"])
    assert not find_host("x1n2", [])


@pytest.mark.parametrize(
    "host",
    ["a", "n-1", "my_host", "1e3", "x1n0.hsn.site.gov", "x1n0.site.", "0.0.0.0", "255.1.2.3", "::1",
     "2001:db8::7", "::ffff:1.2.3.4", "a" * 254],
)  # fmt: skip
def test_is_host(host):
    assert is_host(host)


@pytest.mark.parametrize(
    "host",
    ["", " ", ".", "-n", "--np=2", "#a", "a b", "a\tb", "a,b", "a\0", "a\n", "a.b..c", ".a", "a.-b",
     "n[1-2]", "h:2", "u@h", "a/b", "a;b", "$(a)", "12", "10.0.0", "1.2.3.4.5", "10.0.0.256",
     "010.0.0.1", "10.0.0.1.", "٣", "é", "a\xa0b", "::1%eth0", "::1/64", ":", "1:2", "g::1",
     "a" * 255],
)  # fmt: skip
def test_is_no_host(host):
    assert not is_host(host)
