"""A plan: options, cores, variables, a port; golden lines, which EZPZ_UPDATE_GOLDEN=1 writes."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ezpz_launch import LaunchError, Request, UsageError, main, plan
from ezpz_launch._plan import ports
from ezpz_launch._plan.kind import Launcher
from ezpz_launch._plan.machine_options import select_options
from ezpz_launch._plan.ports import reserve_port
from ezpz_launch._plan.shim import SHIM
from ezpz_topo import imagine, known_machines


def planned(at, launcher="", /, *, nodes=2, env=None, added=(), **options):
    topology = imagine(at, nodes, {}) if isinstance(at, str) else at
    if isinstance(launcher, str):
        launcher = Launcher("x", launcher or topology.machine.launcher, "")
    return plan(
        topology, Request(("true",), env=added, **options), launcher,
        hosts=topology.allocation.hosts, hosts_source="the job", hostfile="f", port=29500,
        user_env=env or {},
    )  # fmt: skip


LAPTOP = replace(imagine("workstation", 1, {}), cpu_count=8, cpus_per_node=8)
HYDRA, PALS = (Launcher("mpiexec", kind, "") for kind in ("hydra", "pals"))


def test_a_plan_for_this_host():
    result = planned(LAPTOP, HYDRA)
    assert (result.nproc, result.on_this_host) == (4, True)
    assert result.environment == {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "2",
    }
    # every decision has a source
    own = {"nproc", "ppn", "hosts", "launcher", "cpu_bind"}
    assert {*own, *result.environment} == set(result.sources)
    assert "OMP_NUM_THREADS" not in planned(LAPTOP, HYDRA, env={"OMP_NUM_THREADS": "7"}).environment
    # a launcher may depend on where ranks run
    assert planned(LAPTOP, lambda at: PALS if at.on_this_host else HYDRA).launcher == PALS


def test_env_of_the_request_comes_last_and_a_machine_that_is_named_is_told():
    added = ("CCL_KVS_MODE=pmi", "X=a=b")
    result = planned("polaris", HYDRA, added=added, machine="polaris")
    assert (result.environment["CCL_KVS_MODE"], result.environment["X"]) == ("pmi", "a=b")
    assert (result.sources["X"], result.environment["EZPZ_MACHINE"]) == ("--env", "polaris")


# The options of the real machines' files.


def chosen(machine, *names, kind=""):
    known = imagine(machine, 1, {}).machine if isinstance(machine, str) else machine
    return select_options(known, names, Launcher("x", kind or known.launcher, ""))


def test_flags_variables_and_binding_come_together_each_option_once():
    result = chosen("polaris", "depth", "nccl-ofi", "depth")
    assert result.names == ("depth", "nccl-ofi")
    assert result.flags == ("--cpu-bind=depth", "--depth=8")
    assert (result.cpu_bind, result.cpu_bind_option) == ("none", "depth")
    assert result.environment["NCCL_NET"] == ("AWS Libfabric", "--option nccl-ofi")
    # a backend is told to the ranks, modules to the user's shell
    assert chosen("frontier", "gloo").environment == {"TORCH_BACKEND": ("gloo", "--option gloo")}
    (note,) = chosen("perlmutter", "system-nccl").notes
    assert note.endswith("module load cudatoolkit nccl cray-mpich")
    assert chosen("aurora", "scale", kind="hydra").flags == ()


POLARIS = imagine("polaris", 1, {}).machine
CONTRADICTING = replace(
    POLARIS,
    options={
        **POLARIS.options,
        "by-numa": replace(POLARIS.options["depth"], cpu_bind="numa"),
        "no-net": replace(POLARIS.options["nccl-ofi"], environment={"NCCL_NET": "Socket"}),
    },
)


@pytest.mark.parametrize(("machine", "names", "kind", "message"), [
    ("aurora", ["scal"], "", r"--option scal: aurora has no .*: no-vni, scale$"),
    ("workstation", ["scale"], "", r"workstation has no such option; .* own: none$"),
    ("aurora", ["no-vni"], "hydra", r"\(--no-vni\) are for pals, and the launcher is hydra"),
    (CONTRADICTING, ["depth", "by-numa"], "",
     "--option by-numa binds by numa, --option depth by none"),
    (CONTRADICTING, ["nccl-ofi", "no-net"], "",
     "--option no-net sets NCCL_NET=Socket, --option nccl-ofi AWS Libfabric"),
])  # fmt: skip
def test_options_that_cannot_be(machine, names, kind, message):
    with pytest.raises(UsageError, match=message):
        chosen(machine, *names, kind=kind)


# Cores.


@pytest.mark.parametrize(("options", "bound", "why"), [
    ({"cpu_bind": "running-jobs"}, 12, "running-jobs: --cpu-bind"),
    ({"cpu_bind": "none"}, 0, "--cpu-bind"),
    ({"cpu_bind": "0-7:8-15", "ppn": 2}, 2, "0-7:8-15: --cpu-bind"),
    ({"ppn": 13}, 0, "13 ranks a host are more than the 12 ranges"),
])  # fmt: skip
def test_cpu_binding(options, bound, why):
    result = planned("aurora", **options)
    assert len(result.cpu_bind) == bound
    assert why in result.sources["cpu_bind"]


@pytest.mark.parametrize(("kind", "wrong", "message"), [
    *(("pals", wrong, "expected") for wrong in ("pytorhc", "depth", "7-0", "0-7")),
    ("hydra", "pytorch", "hydra takes no list of cores"),
])  # fmt: skip
def test_a_binding_that_cannot_be(kind, wrong, message):
    with pytest.raises(UsageError, match=message):
        planned("aurora", kind, cpu_bind=wrong)


@pytest.mark.parametrize(("machine", "kind", "options", "threads"), [
    ("aurora", "pals", {"cpu_bind": "running-jobs"}, "8"),  # the fewest of its list
    ("frontier", "srun", {"cpu_bind": "none"}, "64 cores / 8 ranks"),
    ("perlmutter", "srun", {"ppn": 2}, "64"),  # -c
    ("crux", "pals", {"ppn": 4}, "32"),  # --depth
    ("polaris", "pals", {"options": ("depth",)}, "8"),
])  # fmt: skip
def test_threads_are_the_cores_that_a_rank_is_bound_to(machine, kind, options, threads):
    result = planned(machine, kind, **options)
    if "cores" in threads:
        assert result.sources["OMP_NUM_THREADS"].startswith(threads)
    else:
        assert result.environment["OMP_NUM_THREADS"] == threads


# Variables.

PBS = {
    "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": "1.pbs-0001", "NCPUS": "64",
    "OMP_NUM_THREADS": "64", "TMPDIR": "/var/tmp/pbs.1.pbs-0001",
}  # fmt: skip


@pytest.mark.parametrize(("changed", "own"), [
    ({}, set()),
    ({"OMP_NUM_THREADS": "4"}, {"OMP_NUM_THREADS"}),
    ({"TMPDIR": "/scratch/me"}, {"TMPDIR"}),
    ({"PBS_ENVIRONMENT": ""}, {"OMP_NUM_THREADS", "TMPDIR"}),
    ({"NCPUS": ""}, {"OMP_NUM_THREADS"}),
])  # fmt: skip
def test_what_pbs_sets_for_every_job_is_no_choice_of_the_user(changed, own):
    result = planned("aurora", env={**PBS, **changed})
    assert {"OMP_NUM_THREADS", "TMPDIR"} - result.environment.keys() == own
    assert result.environment["CCL_KVS_MODE"] == "mpi"
    if not own:
        assert result.environment["OMP_NUM_THREADS"] == "4"
        assert result.environment["TMPDIR"] == "/tmp"
        assert "64 is PBS's, not the user's" in result.sources["OMP_NUM_THREADS"]


@pytest.mark.parametrize(("kind", "kept"), [("pals", True), ("hydra", False), ("spawn", False)])
def test_variables_of_a_launcher_are_for_that_launcher(kind, kept):
    result = planned("aurora", kind)
    assert ("CCL_PROCESS_LAUNCHER" in result.environment) is kept
    assert ("CCL_KVS_MODE" in result.environment) is kept
    assert result.environment["FI_MR_CACHE_MONITOR"] == "userfaultfd"
    assert any("CCL_PROCESS_LAUNCHER" in note for note in result.notes) is not kept


def test_variables_of_an_option_outrank_the_machines_and_not_the_users():
    result = planned("aurora", options=("scale",), env={"CCL_OP_SYNC": "0"})
    assert result.environment["FI_CXI_CQ_FILL_PERCENT"] == "30"
    assert result.sources["FI_CXI_CQ_FILL_PERCENT"] == "--option scale"
    assert "CCL_OP_SYNC" not in result.environment
    assert result.sources["--option scale"] == "at scale"


# The port.


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "")]
)
def test_a_port_that_is_taken_is_passed_over(monkeypatch, family, address):
    with socket.socket(family) as holder:
        holder.bind((address, 0))
        holder.listen()
        monkeypatch.setattr(ports, "_FIRST", holder.getsockname()[1])
        monkeypatch.setattr(ports, "_COUNT", 1)
        with pytest.raises(LaunchError, match="is taken"):
            reserve_port()


CHOOSE = """
import os
from ezpz_launch._plan.ports import reserve_port
os.urandom = bytes
print(reserve_port(), flush=True)
input()
"""


def test_launches_at_once_have_a_port_each_and_the_next_one_what_they_leave(process):
    def choose():
        pipe = subprocess.PIPE
        child = process(sys.executable, "-c", CHOOSE, stdin=pipe, stdout=pipe, text=True)
        return child, child.stdout.readline()

    # Each would choose the same, and none of their ranks listens yet.
    (first, one), (_, two), (_, three) = choose(), choose(), choose()
    assert len({one, two, three}) == 3
    assert 20000 <= int(one) < 30000, "no ephemeral one"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(one)))
    first.communicate("\n")
    assert choose()[1] == one


@pytest.mark.parametrize(("machine", "kind", "nodes", "env", "each"), [
    ("frontier", "srun", 9408, {}, "1176"),
    ("frontier", "srun", 1024, {}, None),
    ("frontier", "srun", 9408, {"TORCH_NCCL_RANKS_PER_ROOT": "512"}, None),
    ("aurora", "pals", 10080, {}, None),
])  # fmt: skip
def test_many_ranks_of_nccl_read_few_numbers(machine, kind, nodes, env, each):
    result = planned(machine, kind, nodes=nodes, env=env)
    assert result.environment.get("TORCH_NCCL_RANKS_PER_ROOT") == each


# The golden files.

GOLDEN = Path(__file__).parent / "golden"
MACHINES = known_machines({})


def cases(machine):
    """Return what is requested, by name; a host without devices is told by its cores."""
    # Where the file tells neither, a plan takes two ranks: four is another number than that.
    devices = machine.devices_per_node or 0
    per_host = devices or (machine.cores_per_node or 8) // 2
    fewer = "fewer ranks than devices" if devices else "another number of ranks"
    return {
        "one node": ["-N", "1"],
        "many nodes": ["-N", "4"],
        fewer: ["-N", "1", "-n", str(per_host - 1 if devices else per_host // 2 + 1)],
        "uneven": ["-N", "2", "-n", str(2 * per_host - 1)],
        **{f"option {name}": ["-N", "2", "--option", name] for name in machine.options},
    }


@pytest.mark.parametrize("name", MACHINES)
def test_the_command_lines_of_a_machine(name, capsys, monkeypatch):
    assert {path.stem for path in GOLDEN.iterdir()} <= set(MACHINES), "none is left over"
    monkeypatch.delenv("EZPZ_MACHINES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    outputs = []
    for title, words in cases(MACHINES[name]).items():
        asked = ["--dry-run", "--machine", name, *words, "python", "train.py", "--lr", "1e-4"]
        assert main(asked) == 0
        outputs.append(f"==== {title}: ezpz-launch {' '.join(asked)}\n{capsys.readouterr().out}")
    text = "\n".join(outputs).replace(SHIM, "rank_shim.sh").replace(sys.executable, "python")
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("EZPZ_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
