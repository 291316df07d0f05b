import pytest

from ezpz_launch import UsageError
from ezpz_launch._placement import place

HOSTS = ("a", "b", "c", "d")


def placed(hosts, nproc=None, ppn=None, default=4):
    return place(hosts, nproc=nproc, ppn=ppn, default_ppn=default, why_default="devices")


@pytest.mark.parametrize(
    ("hosts", "nproc", "ppn", "ranks"),
    [
        (HOSTS, None, None, (4, 4, 4, 4)),
        (HOSTS, None, 2, (2, 2, 2, 2)),
        (HOSTS[:1], None, None, (4,)),
        # filled in order: the others get none
        (HOSTS, 8, None, (4, 4)),
        (HOSTS, 7, None, (4, 3)),
        (HOSTS, 2, None, (2,)),
        (HOSTS, 5, 2, (2, 2, 1)),
        # more than there are devices, as evenly as it goes
        (HOSTS[:1], 6, None, (6,)),
        (HOSTS[:2], 9, None, (5, 4)),
        (HOSTS[:2], 8, 8, (8,)),
    ],
)
def test_ranks_of_each_host(hosts, nproc, ppn, ranks):
    placement = placed(hosts, nproc, ppn)
    assert placement.ranks == ranks
    assert placement.hosts == tuple(hosts[: len(ranks)])
    assert placement.nproc == sum(ranks)
    assert placement.is_even == (len(set(ranks)) == 1)


@pytest.mark.parametrize(
    ("nproc", "ppn", "message"),
    [
        (9, 2, "-n 9 with --ppn 2 on 4 hosts: room for 8 ranks"),
        (0, None, "-n 0: expected at least 1 rank"),
        (None, 0, "--ppn 0: expected at least 1 rank"),
        (-1, None, "-n -1"),
    ],
)
def test_numbers_that_contradict_each_other(nproc, ppn, message):
    with pytest.raises(UsageError, match=message):
        placed(HOSTS, nproc, ppn)


@pytest.mark.parametrize(
    ("nproc", "ppn", "source", "per_host"),
    [
        (None, None, "4 x 4: devices", "devices"),
        (None, 2, "4 x 2: --ppn", "--ppn"),
        (8, None, "-n", "devices"),
        (24, None, "-n", "-n 24 / 4 hosts"),
        (4, 2, "-n", "--ppn"),
    ],
)
def test_every_number_has_a_source(nproc, ppn, source, per_host):
    placement = placed(HOSTS, nproc, ppn)
    assert (placement.source, placement.source_per_host) == (source, per_host)


def test_ten_thousand_hosts():
    placement = placed([f"n{k}" for k in range(10_080)], default=12)
    assert (placement.nproc, len(placement.hosts)) == (120_960, 10_080)
