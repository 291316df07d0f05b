import pytest

from ezpz_launch import UsageError
from ezpz_launch._placement import match_hosts, select_hosts
from ezpz_topo import NodelistError

HOSTS = ("nid001.hsn", "nid002.hsn", "nid003.hsn", "nid004.hsn")


def selected(**options):
    hosts, why = select_hosts(HOSTS, "PBS_NODEFILE", **options)
    return [host.partition(".")[0] for host in hosts], why


@pytest.mark.parametrize(
    ("options", "hosts", "why"),
    [
        ({}, ["nid001", "nid002", "nid003", "nid004"], "PBS_NODEFILE"),
        ({"include": "nid[002,004]"}, ["nid002", "nid004"], "PBS_NODEFILE, --include nid[002,004]"),
        ({"include": "nid004,nid001"}, ["nid001", "nid004"],
         "PBS_NODEFILE, --include nid004,nid001"),
        ({"exclude": "nid001"}, ["nid002", "nid003", "nid004"], "PBS_NODEFILE, --exclude nid001"),
        ({"nodes": 2}, ["nid001", "nid002"], "the first 2 of 4: PBS_NODEFILE"),
        ({"nodes": 1, "exclude": "nid001"}, ["nid002"],
         "the first 1 of 3: PBS_NODEFILE, --exclude nid001"),
    ],
)  # fmt: skip
def test_which_hosts_and_why(options, hosts, why):
    assert selected(**options) == (hosts, why)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": "nid009"}, "--include nid009: none of the hosts nid001.hsn"),
        ({"exclude": "nid[001-004]"}, "no host is left of 4"),
        ({"nodes": 5}, r"-N 5: there are 4 hosts \(PBS_NODEFILE\); expected from 1 to 4"),
        ({"nodes": -1}, "-N -1"),
    ],
)
def test_what_cannot_be(options, message):
    with pytest.raises(UsageError, match=message):
        selected(**options)


def test_a_nodelist_that_does_not_parse():
    with pytest.raises(NodelistError, match="not closed"):
        selected(include="nid[001-")


def test_names_mean_hosts_whatever_their_suffix_case_or_spelling():
    hosts = ("nid001.hsn", "nid002", "10.0.0.1", "fe80::1")
    names = ("NID001", "nid002.example", "10.0.0.1", "fe80:0::1", "nid009", "10.0.0.2")
    found, unknown = match_hosts(names, hosts)
    assert list(found) == list(hosts)
    assert unknown == ["nid009", "10.0.0.2"]


def test_ten_thousand_of_ten_thousand():
    # One pass each: a search of every host for every name would take minutes.
    hosts = tuple(f"nid{k:05d}.hsn" for k in range(10_080))
    kept, _ = select_hosts(hosts, "job", include="nid[00000-10078]")
    assert kept == hosts[:-1]
