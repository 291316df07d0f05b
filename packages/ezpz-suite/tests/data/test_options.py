"""The options suit the machine: those of a CPU here, of others by what they depend on."""

import sys
from types import SimpleNamespace

import pytest

import ezpz_device
import ezpz_topo
from ezpz.data import loader_options
from ezpz_dist import DataLoader


@pytest.fixture
def node(monkeypatch):
    """A node of so many CPUs, ranks and a kind of device."""

    def be(device, cpus=64, ranks=4, bound=None):
        monkeypatch.setattr(ezpz_device, "get_torch_device_type", lambda: device)
        monkeypatch.setattr(ezpz_topo, "get_cpus_per_node", lambda: cpus)
        monkeypatch.setattr(ezpz_topo, "get_local_world_size", lambda: ranks)
        monkeypatch.setattr(
            "os.sched_getaffinity", lambda pid: set(range(bound or cpus)), raising=False
        )

    return be


def test_on_this_machine():
    options = loader_options()
    if ezpz_device.get_torch_device_type() == "cpu":
        assert options == {"num_workers": 0, "pin_memory": False}
    assert len(list(DataLoader(range(8), batch_size=4, **options))) == 2


@pytest.mark.slow
def test_workers_that_are_asked_for_work():
    # Not forked: other tests' threads are here.
    options = {**loader_options(num_workers=1), "multiprocessing_context": "forkserver"}
    assert options["persistent_workers"]
    loader = DataLoader(range(8), batch_size=4, **options)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("cpus", "ranks", "bound", "workers"),
    [(64, 4, None, 8), (24, 4, None, 5), (64, 4, 2, 1), (64, 4, 1, 0), (2, 4, None, 0)],
)
def test_workers_are_this_ranks_share_of_the_cpus(node, cpus, ranks, bound, workers):
    node("cuda", cpus, ranks, bound)
    options = loader_options()
    assert options["num_workers"] == workers
    assert options["pin_memory"] is True
    assert ("persistent_workers" in options) is (workers > 0)
    assert options.get("multiprocessing_context") == ("forkserver" if workers else None)


def test_memory_is_pinned_where_that_helps_and_nothing_is_forked_beside_mpi(node, monkeypatch):
    for device, pinned in (("cuda", True), ("xpu", True), ("mps", False), ("cpu", False)):
        node(device)
        assert loader_options()["pin_memory"] is pinned
    assert "multiprocessing_context" not in loader_options(2)
    running = SimpleNamespace(Is_initialized=lambda: True, Is_finalized=lambda: False)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", running)
    assert loader_options(2)["multiprocessing_context"] == "forkserver"
    with pytest.raises(ValueError, match="num_workers=-1; expected 0 or more"):
        loader_options(-1)
