"""What set-up decided, what the environment says, and the picture of a world."""

import json

import pytest

import ezpz_dist
import ezpz_topo
from ezpz_dist._info import get_dist_info, picture, query_environment

INFO = {
    "is_set_up": True, "job_id": "1234", "scheduler": "pbs", "launcher": "pals",
    "machine": "aurora", "device": "xpu:0", "backend": "xccl", "timeout": 600.0,
    "degrees": {"tensor": 1, "context": 1, "pipeline": 1, "data": 12000},
    "versions": {"torch": "2.13.0", "python": "3.12.1"},
}  # fmt: skip
ONE = {
    "is_set_up": False, "launcher": "none", "job_id": None, "timeout": None,
    "device": "cpu", "backend": "gloo",
}  # fmt: skip
PICTURE_OF_ONE = """\
1 rank on 1 node
one process on aurora
device cpu, backend gloo
torch 2.13.0, python 3.12.1
not set up yet: this is what the environment says

node  host    ranks
   0  laptop  0"""
EIGHT = {"degrees": {"tensor": 2, "context": 1, "pipeline": 1, "data": 4}}
PICTURE_OF_EIGHT = """\
8 ranks on 2 nodes, 4 a node
started by pals on aurora, pbs job 1234
device xpu:0, backend xccl, time-out 600 s
parallel: tensor 2 x context 1 x pipeline 1 x data 4
torch 2.13.0, python 3.12.1

node  host    ranks
   0  nid001  0  1  2  3
   1  nid002  4  5  6  7"""
PICTURE_OF_THOUSANDS = """\
12,000 ranks on 1,000 nodes, 12 a node
started by pals on aurora, pbs job 1234
device xpu:0, backend xccl, time-out 600 s
torch 2.13.0, python 3.12.1

node  host   ranks
   0  x0000  0-11
   1  x0001  12-23
   2  x0002  24-35
 ...  996 more: x[0003-0998], ranks 36-11987
 999  x0999  11988-11999"""


@pytest.mark.parametrize(
    ("info", "hosts", "expected"),
    [
        (ONE, ["laptop"], PICTURE_OF_ONE),
        (EIGHT, ["nid001"] * 4 + ["nid002"] * 4, PICTURE_OF_EIGHT),
        ({}, [f"x{rank // 12:04}" for rank in range(12_000)], PICTURE_OF_THOUSANDS),
    ],
)
def test_a_picture(info, hosts, expected):
    assert picture({**INFO, **info}, hosts) == expected


def test_a_picture_of_an_odd_world():
    # Cyclic, uneven, too many on a node for columns, and names that no nodelist holds.
    hosts = ["b 1", "a,2"] * 20 + ["b 1"]
    lines = picture(INFO, hosts).splitlines()
    assert lines[0] == "41 ranks on 2 nodes, 20 to 21 a node"
    assert lines[-2].startswith("   0  b 1   0, 2, 4, 6, 8, ")
    assert lines[-2].endswith(" ...")
    many = [f"{'ab'[rank % 2]},{rank}" for rank in range(40)]
    line = picture(INFO, many).splitlines()[-2]
    assert line.startswith(" ...  36 more: b,3, a,4, ")
    assert line.endswith(" ..., ranks 3-38")


def test_query_environment_names_its_sources():
    env = {
        "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "17", "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "MASTER_ADDR": "nid1", "HOME": "/root",
    }  # fmt: skip
    found = query_environment(env)
    assert [found[key] for key in ("rank", "world_size", "local_rank")] == [5, 8, 1]
    assert (found["local_world_size"], found["node_rank"], found["launcher"]) == (4, 1, "slurm")
    assert found["sources"]["world_size"] == "SLURM_STEP_NUM_TASKS"
    assert found["variables"] == {
        name: value for name, value in env.items() if name not in ("HOME", "SLURM_JOB_ID")
    }
    assert json.loads(json.dumps(found)) == found
    assert query_environment({})["variables"] == {}
    assert query_environment({})["world_size"] == 1
    del env["SLURM_LOCALID"]
    with pytest.raises(ezpz_topo.IncompleteLauncherError, match="without SLURM_LOCALID"):
        query_environment(env)


def test_a_job_whose_hosts_only_a_command_could_tell(monkeypatch):
    monkeypatch.setenv("PBS_JOBID", "7.server")
    monkeypatch.setenv("PBS_NODEFILE", "/nowhere/7.server")
    monkeypatch.setenv("PBS_ENVIRONMENT", "PBS_BATCH")
    found = get_dist_info()
    assert (found["scheduler"], found["job_id"]) == ("pbs", "7.server")
    assert found["hosts"] == [ezpz_topo.get_hostname()]


SCRIPT = """
import json, contextlib, io
before = get_dist_info()
rank = setup_torch(timeout=30)
size = dist.get_world_size()
if size > 1:
    import ezpz_tp
    ezpz_tp.initialize_tensor_parallel(2)
with contextlib.redirect_stdout(io.StringIO()) as printed:
    text = print_dist_setup()
assert printed.getvalue() == (text + "\\n" if rank == 0 else ""), printed.getvalue()
print(json.dumps([before, get_dist_info(), text]))
if size > 1:
    ezpz_tp.destroy_tensor_parallel()
cleanup()
"""


@pytest.mark.parametrize("size", [1, 4])
def test_what_set_up_decided(ranks, size):
    for rank, out in enumerate(ranks(size, SCRIPT)):
        before, info, text = json.loads(out)
        assert not before["is_set_up"]
        assert info["is_set_up"]
        for found in (before, info):
            place = [found[key] for key in ("rank", "world_size", "local_rank", "num_nodes")]
            assert place == [rank, size, rank, 1]
            assert (found["device"], found["device_type"], found["backend"]) == (
                "cpu", "cpu", "gloo",
            )  # fmt: skip
            assert found["versions"]["ezpz_dist"] == ezpz_dist.__version__
        assert (before["timeout"], info["timeout"]) == (None, 30)
        assert info["hosts"] == [ezpz_topo.get_hostname()]
        if size > 1:
            assert info["degrees"] == {"tensor": 2, "context": 1, "pipeline": 1, "data": 2}
            assert before["degrees"]["data"] == 4
            assert isinstance(info["master_port"], int)
            assert "parallel: tensor 2 x context 1 x pipeline 1 x data 2" in text
            assert text.startswith("4 ranks on 1 node\nstarted by torchrun on ")
        assert text.splitlines()[-1].endswith("  ".join(map(str, range(size))))
