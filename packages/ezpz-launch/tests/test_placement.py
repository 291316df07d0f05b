"""Which hosts, how many ranks, and of which cores: without any launcher."""

import itertools
import re
import socket
from contextlib import suppress
from dataclasses import replace

import pytest

from ezpz_launch import LaunchError, Request, UsageError
from ezpz_launch._plan.placement import arrange, match_hosts, place_ranks, select_hosts
from ezpz_topo import Accelerators, imagine

# Hosts.

NIDS = ("nid001.hsn", "nid002.hsn", "nid003.hsn", "nid004.hsn")


def selected(**options):
    hosts, why = select_hosts(NIDS, "PBS_NODEFILE", **options)
    return [int(host[3:6]) for host in hosts], why


@pytest.mark.parametrize(("options", "hosts", "why"), [
    ({}, [1, 2, 3, 4], "PBS_NODEFILE"),
    ({"include": "nid[002,004]"}, [2, 4], "PBS_NODEFILE, --include nid[002,004]"),
    ({"include": "nid004,nid001"}, [1, 4], "PBS_NODEFILE, --include nid004,nid001"),
    ({"exclude": "nid001"}, [2, 3, 4], "PBS_NODEFILE, --exclude nid001"),
    ({"nodes": 2}, [1, 2], "the first 2 of 4: PBS_NODEFILE"),
    ({"nodes": 1, "exclude": "nid001"}, [2],
     "the first 1 of 3: PBS_NODEFILE, --exclude nid001"),
])  # fmt: skip
def test_which_hosts_and_why(options, hosts, why):
    assert selected(**options) == (hosts, why)


@pytest.mark.parametrize(("options", "message"), [
    ({"include": "nid009"}, "--include nid009: none of the hosts nid001.hsn"),
    ({"exclude": "nid[001-004]"}, "no host is left of 4"),
    ({"nodes": 5}, r"-N 5: there are 4 hosts \(PBS_NODEFILE\); .* from 1 to 4"),
    ({"include": "nid[001-"}, "--include: nodelist"),
    ({"spares": 4}, "--spares 4: there are 4 hosts .* expected fewer spares than hosts"),
    ({"nodes": 3, "spares": 2}, "-N 3 --spares 2: there are 4 hosts .* from 1 to 2"),
])  # fmt: skip
def test_hosts_that_cannot_be(options, message):
    with pytest.raises(UsageError, match=message):
        selected(**options)


def test_names_mean_hosts_whatever_their_suffix_case_or_spelling():
    hosts = ("nid001.hsn", "nid002", "10.0.0.1", "fe80::1")
    names = ("NID001", "nid002.example", "10.0.0.1", "fe80:0::1", "nid009", "10.0.0.2")
    found, unknown = match_hosts(names, hosts)
    assert list(found) == list(hosts)
    assert unknown == ["nid009", "10.0.0.2"]
    assert match_hosts(["127.0.0.1"], ["a", "localhost"]) == ({"localhost": "127.0.0.1"}, [])


def test_ten_thousand_of_ten_thousand():
    # One pass each: a search of every host for every name would take minutes.
    hosts = tuple(f"nid{k:05d}.hsn" for k in range(10_080))
    kept, _ = select_hosts(hosts, "job", include="nid[00000-10078]")
    assert kept == hosts[:-1]
    placement = place_ranks(hosts, nproc=None, ppn=None, default_ppn=12, why_default="devices")
    assert (placement.nproc, len(placement.hosts)) == (120_960, 10_080)


# Ranks.


@pytest.mark.parametrize(("hosts", "nproc", "ppn", "ranks", "sources"), [
    (4, None, None, (4, 4, 4, 4), ("4 x 4: devices", "devices")),
    (4, None, 2, (2, 2, 2, 2), ("4 x 2: --ppn", "--ppn")),
    (1, None, None, (4,), ("devices", "devices")),
    # filled in order: the others get none
    (4, 8, None, (4, 4), ("-n", "devices")),
    (4, 7, None, (4, 3), ("-n", "devices")),
    (4, 2, None, (2,), ("-n", "devices")),
    (4, 5, 2, (2, 2, 1), ("-n", "--ppn")),
    # more than there are devices, as evenly as it goes
    (1, 6, None, (6,), ("-n", "-n 6 / 1 hosts")),
    (2, 9, None, (5, 4), ("-n", "-n 9 / 2 hosts")),
    (2, 8, 8, (8,), ("-n", "--ppn")),
])  # fmt: skip
def test_ranks_of_each_host(hosts, nproc, ppn, ranks, sources):
    names = NIDS[:hosts]
    placement = place_ranks(names, nproc=nproc, ppn=ppn, default_ppn=4, why_default="devices")
    assert placement == (names[: len(ranks)], ranks, *sources)
    assert placement.nproc == sum(ranks)


def job(nodes, *, on_node=True, machine="generic-slurm", **facts):
    topology = imagine(machine, nodes, {})
    first = topology.allocation.hosts[0] if on_node else None
    allocation = replace(topology.allocation, node_name=first)
    told = {"cpu_count": 2, "cpus_per_node": 8, "cpus_per_node_source": "SLURM_CPUS_ON_NODE"}
    return replace(topology, allocation=allocation, **told | facts)


def arranged(topology, hosts=None, *, slots=0, source="the job", **options):
    hosts = topology.allocation.hosts if hosts is None else hosts
    request = Request(("python", "train.py"), **options)
    return arrange(topology, request, hosts=hosts, hosts_source=source, slots=slots)


# One host of 8 cores, of which this process may use 2.
HERE = job(1, machine="workstation", cpu_source="affinity")
CUDA = Accelerators("cuda", 4, "4 x /dev/nvidia<N>")


@pytest.mark.parametrize(("topology", "options", "here", "cores", "ranks"), [
    # this host has the cores that this process may use, others those of a node
    (HERE, {}, True, (2, "affinity"), (2,)),
    (job(2), {}, False, (8, "SLURM_CPUS_ON_NODE"), (4, 4)),
    (job(2), {"exclude": "node0001"}, False, (8, "SLURM_CPUS_ON_NODE"), (4,)),
    (job(2, cpu_source="affinity"), {"nproc": 1}, True, (2, "affinity"), (1,)),
    # Crux's file says 128; the login node's own 8 are no fact of its nodes
    (job(2, on_node=False, machine="crux"), {}, False,
     (128, "cores_per_node of crux.toml"), (64, 64)),
    # cores are not hardware threads, and part of a node is no whole one
    (job(2, machine="crux", cpus_per_node=256), {}, False,
     (128, "cores_per_node of crux.toml"), (64, 64)),
    (job(2, machine="crux", cpus_per_node=16), {}, False, (16, "SLURM_CPUS_ON_NODE"), (8, 8)),
])  # fmt: skip
def test_whose_cores_count(topology, options, here, cores, ranks):
    told = arranged(topology, **options)
    assert (told.on_this_host, (told.cores, told.cores_source)) == (here, cores)
    assert told.placement.ranks == ranks


def test_without_devices_one_rank_per_two_cores_at_least_two():
    for cores, ranks in ((1, 2), (2, 2), (8, 4), (9, 4), (128, 64)):
        assert arranged(replace(HERE, cpu_count=cores)).placement.nproc == ranks
    told = arranged(imagine("generic-pbs", 2, {}))  # cores that are not known
    assert told.placement.ranks == (2, 2)
    assert "cores are not told by generic-pbs.toml" in told.placement.source


@pytest.mark.parametrize(
    ("first", "slots", "options", "ranks"),
    [(0, (1, 4, 6), {}, (1, 1, 1)), (0, (1, 4, 6), {"exclude": "node0001"}, (4, 4)),
     (0, (1, 4, 6), {"include": "node0003"}, (6,)), (1, (0, 6), {}, (6, 6)), (1, 3, {}, (3, 3))],
)  # fmt: skip
def test_slots_of_a_hostfile_are_those_of_the_hosts_in_use(first, slots, options, ranks):
    hosts = job(3).allocation.hosts[first:]
    told = arranged(job(3), hosts, slots=slots, source="argument", **options)
    assert told.placement.ranks == ranks
    assert "slots of the hostfile (argument)" in told.placement.source_per_host


PBS_JOB = job(2, machine="generic-pbs", cpus_per_node=6, cpus_per_node_source="exec_host and NCPUS")


@pytest.mark.parametrize(("slots", "ranks"), [
    ((3, 2), (3, 2)),  # 1:ncpus=3:mpiprocs=3+1:ncpus=2:mpiprocs=2
    ((2, 2), (2, 2)),
    ((3, 1), (3, 1)),
    ((1, 1), (3, 3)),  # no mpiprocs: by ncpus
    ((1, 3), (1, 1)),
])  # fmt: skip
def test_mpiprocs_of_a_pbs_job_decide(slots, ranks):
    told = arranged(PBS_JOB, slots=slots)
    assert told.placement.ranks == ranks
    assert ("1, 3; 1 ranks a host are started" in told.warning) == (slots == (1, 3))
    assert told.placement.source.startswith(f"{sum(ranks)}: " if len(set(ranks)) > 1 else "2 x ")


def test_slots_of_which_only_the_last_hosts_differ():
    assert arranged(job(3), slots=(4, 4, 3)).placement.ranks == (4, 4, 3)
    assert arranged(job(2), slots=(4, 3), source="argument").placement.ranks == (4, 3)
    # The last one does not tell: none is given more than it has.
    assert arranged(job(3), slots=(4, 2, 0), source="argument").placement.ranks == (2, 2, 2)
    assert arranged(job(2), slots=(4, 3), nproc=2).placement.ranks == (2,)
    assert arranged(job(2), slots=(4, 3), ppn=1).placement.ranks == (1, 1)


def test_a_job_of_one_cpu_has_one_rank():
    alone = job(1, machine="generic-pbs", cpu_source="NCPUS", cpu_count=1)
    told = arranged(alone, slots=(1,))
    assert (told.placement.ranks, told.cores, told.cores_source) == ((1,), 1, "NCPUS")


def test_one_rank_a_device():
    for slots, ppn in (((2, 2), 2), ((1, 1), 4), ((8, 8), 4)):  # mpiprocs may be fewer
        assert arranged(replace(PBS_JOB, accelerators=CUDA), slots=slots).placement.ppn == ppn
    told = arranged(replace(HERE, accelerators=CUDA)).placement
    assert (told.ranks, told.source) == ((4,), "one a device: 4 x /dev/nvidia<N>")
    uncounted = replace(HERE, accelerators=Accelerators("xpu", 0, "TORCH_DEVICE=xpu"))
    with pytest.raises(LaunchError, match="how many ranks"):
        arranged(uncounted)
    assert arranged(uncounted, nproc=12).placement.ranks == (12,)
    assert arranged(job(2, accelerators=CUDA), one_device=True).placement.ranks == (4, 4)
    # but so many hosts are requested, and so many are used
    told = arranged(imagine("aurora", 4, {}), nproc=4, nodes=4).placement
    assert (told.ranks, told.source_per_host) == ((1, 1, 1, 1), "-n 4 / -N 4")


@pytest.mark.parametrize(("topology", "options", "message"), [
    (job(3), {"nproc": 7, "ppn": 2}, "-n 7 with --ppn 2 on 3 hosts: room for 6 ranks"),
    (job(3), {"nproc": 4, "nodes": 3}, "-n 4 on -N 3 hosts: 2 ranks each .* fill 2 of them"),
    (job(3), {"nproc": 4, "nodes": 2, "ppn": 4}, r"-n 4 on -N 2 .*: 4 ranks each \(--ppn\) f"),
    (job(3), {"nproc": 2, "nodes": 3}, "-n 2 on -N 3 hosts: 1 ranks .* expected -N 2, or -n f"),
    (job(3), {"min_nodes": 4}, "--min-nodes 4: 3 hosts are used"),
    (job(3), {"one_device": True}, "--one-device: no device to show"),
    (job(2, accelerators=CUDA), {"one_device": True, "ppn": 8},
     r"--one-device with 8 ranks a host \(--ppn\): there are 4"),
])  # fmt: skip
def test_numbers_that_contradict_each_other(topology, options, message):
    with pytest.raises(UsageError, match=message):
        arranged(topology, **options)


LOOPBACK = ["localhost", "127.0.0.1", "127.0.1.1", "127.9.8.7", "::1", "0.0.0.0", "ip6-localhost"]


def find_address(family, elsewhere):
    """Return an address of this host by which it would reach another; None if it has none."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((elsewhere, 9))  # sends nothing
        return probe.getsockname()[0]
    return None


@pytest.fixture
def own_addresses():
    """The addresses of this host that others would know; none where it has no network."""
    pairs = ((socket.AF_INET, "203.0.113.9"), (socket.AF_INET6, "2001:db8::9"))
    return [address for pair in pairs if (address := find_address(*pair))]


def test_this_host_by_any_of_its_names(own_addresses):
    laptop = replace(HERE, hostname="laptop")
    own = ("laptop", "LAPTOP.example.org", *LOOPBACK, *own_addresses)
    for host in own:
        assert arranged(laptop, [host], source="argument").on_this_host, host
    assert not arranged(laptop, ["203.0.113.9"], source="argument").on_this_host


@pytest.mark.parametrize("host", LOOPBACK)
def test_a_loopback_name_among_several_hosts(host):
    for spares in (0, 1):
        with pytest.raises(UsageError, match=rf"{re.escape(host)} among several .* own name; corr"):
            arranged(HERE, ["a", "b", host], source="argument", spares=spares)
    # where it has no rank, it does no harm
    assert arranged(HERE, [host, "b"], source="argument", nodes=1).on_this_host


def test_two_names_of_this_host(own_addresses):
    laptop = replace(HERE, hostname="laptop")
    pairs = list(itertools.combinations(["laptop", *own_addresses], 2))
    for one, other in pairs:
        for hosts in ([one, other], ["b", one, "c", other]):
            with pytest.raises(UsageError, match=f"{one} and {other} are both this host .*; remo"):
                arranged(laptop, hosts, source="argument")
        # one after the other, as a spare is used, they may be
        assert arranged(laptop, [one, other], source="argument", nodes=1, spares=1).on_this_host
    assert pairs or not own_addresses


def test_loopback_in_a_job():
    assert arranged(job(2), ["127.0.0.1"], source="argument").on_this_host
    login = job(2)
    login = replace(login, allocation=replace(login.allocation, node_name=None))
    with pytest.raises(UsageError, match=r"127.0.0.1 \(argument\): this host is no node of job"):
        arranged(login, ["127.0.0.1"], source="argument")
