"""A plan as a whole, and golden command lines, which EZPZ_UPDATE_GOLDEN=1 writes again."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ezpz_launch import Request, main, plan
from ezpz_launch._launchers import Launcher
from ezpz_launch._plan import SHIM
from ezpz_topo import imagine, known_machines

LAPTOP = replace(imagine("workstation", 1, {}), cpu_count=8, cpus_per_node=8)
HYDRA = Launcher("/venv/bin/mpiexec", "hydra", "--version says HYDRA")
PALS = Launcher("mpiexec", "pals", "")


def planned(topology, nproc=None, *, env=None, launcher=HYDRA, added=(), **options):
    return plan(
        topology, Request(("python", "train.py"), nproc, env=added, **options), launcher,
        hosts=topology.allocation.hosts, hosts_source="no job is running", hostfile="/tmp/hosts",
        port=29500, user_env=env or {},
    )  # fmt: skip


def test_a_plan_for_this_host():
    told = planned(LAPTOP)
    assert (told.nproc, told.on_this_host) == (4, True)
    assert told.environment == {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "2",
    }
    # every decision has a source
    own = {"nproc", "ppn", "hosts", "launcher", "cpu_bind"}
    assert {*own, *told.environment} == set(told.sources)
    assert "OMP_NUM_THREADS" not in planned(LAPTOP, env={"OMP_NUM_THREADS": "7"}).environment
    # a launcher may depend on where ranks run
    assert planned(LAPTOP, launcher=lambda at: PALS if at.on_this_host else HYDRA).launcher == PALS


def test_env_of_the_request_comes_last_and_a_machine_that_is_named_is_told():
    added = ("CCL_KVS_MODE=pmi", "X=a=b")
    told = planned(imagine("polaris", 1, {}), added=added, machine="polaris")
    assert (told.environment["CCL_KVS_MODE"], told.environment["X"]) == ("pmi", "a=b")
    assert (told.sources["X"], told.environment["EZPZ_MACHINE"]) == ("--env", "polaris")


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
    said = []
    for title, words in cases(MACHINES[name]).items():
        asked = ["--dry-run", "--machine", name, *words, "python", "train.py", "--lr", "1e-4"]
        assert main(asked) == 0
        said.append(f"==== {title}: ezpz-launch {' '.join(asked)}\n{capsys.readouterr().out}")
    text = "\n".join(said).replace(SHIM, "rank_shim.sh").replace(sys.executable, "python")
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("EZPZ_UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
