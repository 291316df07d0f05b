import pytest

from ezpz_topo import MachineError, imagine


def test_four_nodes_of_aurora_from_anywhere():
    aurora = imagine("aurora", 4, {"SLURM_JOB_ID": "7", "PMI_RANK": "1"})
    assert (aurora.machine.name, aurora.allocation.scheduler) == ("aurora", "pbs")
    assert aurora.allocation.hosts == ("node0001", "node0002", "node0003", "node0004")
    assert aurora.allocation.on_node
    assert (aurora.accelerators.device_type, aurora.accelerators.count) == ("xpu", 12)
    assert aurora.rank.world_size == 1
    assert all(source for _, _, source in aurora.explain())
    assert "hypothetical: 4 nodes of aurora" in aurora.allocation.sources["hosts"]


def test_a_machine_of_the_users(tmp_path):
    (tmp_path / "utopia.toml").write_text('extends = "polaris"\n[match]\nhostnames = ["utopia"]\n')
    assert imagine("utopia", env={"EZPZ_MACHINES": str(tmp_path)}).accelerators.count == 4


def test_a_workstation_has_no_job():
    assert imagine("workstation").allocation.scheduler == "none"


@pytest.mark.parametrize(("name", "nodes"), [("atlantis", 1), ("aurora", 0), ("aurora", 10**9)])
def test_what_cannot_be_imagined(name, nodes):
    with pytest.raises(MachineError, match="expected"):
        imagine(name, nodes, {})
