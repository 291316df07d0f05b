"""ezpz-launch inside a real job: it starts ranks where it can, and says so where it cannot."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.sandbox import SlurmSandbox


@pytest.fixture
def launch(tool: Callable[[str], str]) -> list[str]:
    return [tool("ezpz-launch"), "-n", "2"]


def assert_refused(status: int, stderr: str) -> None:
    assert status == 2
    (line,) = stderr.splitlines()
    assert line.startswith("ezpz-launch: slurm job ")
    assert "srun -n RANKS COMMAND" in line


def test_a_salloc_shell_of_four_nodes_is_refused(slurm: SlurmSandbox, launch: list[str]) -> None:
    done = slurm.run(["salloc", "-Q", "-N", "4", *launch, "echo", "started"], expect=None)
    assert_refused(done.returncode, done.stderr)
    assert done.stdout == ""


def test_a_batch_script_of_four_nodes_is_refused(slurm: SlurmSandbox, launch: list[str]) -> None:
    command = shlex.join([*launch, "echo", "started"])
    output = slurm.batch(f"{command} || echo status $?", "-N", "4")
    line, status = output.splitlines()
    assert_refused(int(status.removeprefix("status ")), line)
    assert "4 nodes" in line


def test_an_interactive_step_of_four_nodes_is_refused(
    slurm: SlurmSandbox, launch: list[str]
) -> None:
    interactive = ["srun", "--interactive", "-Q", "-N", "1", "-n", "1"]
    command = ["salloc", "-Q", "-N", "4", *interactive, *launch, "echo", "started"]
    done = slurm.run(command, expect=None)
    assert "started" not in done.stdout
    assert done.returncode == 2
    assert "ezpz-launch: slurm job " in done.stderr


def test_a_batch_script_of_one_node_starts_its_ranks(
    slurm: SlurmSandbox,
    sandbox: ModuleType,
    program: Callable[[str], list[str]],
    launch: list[str],
    tmp_path: Path,
) -> None:
    command = shlex.join([*launch, *program("say_rank"), str(tmp_path)])
    slurm.batch(command, "-N", "1", "-n", "2")
    said = sandbox.reports(tmp_path)
    assert [(one["rank"], one["world_size"], one["local_rank"]) for one in said] == [
        (0, 2, 0),
        (1, 2, 1),
    ]
    assert {one["launcher"] for one in said} == {"ezpz"}


def test_a_step_of_one_task_starts_its_ranks_on_its_node(
    slurm: SlurmSandbox, launch: list[str]
) -> None:
    step = ["srun", "-w", "nid002", "-N", "1", "-n", "1"]
    command = ["salloc", "-Q", "-N", "4", "-n", "8", *step, *launch, "printenv", "SLURMD_NODENAME"]
    assert slurm.run(command).stdout.split() == ["nid002", "nid002"]


def test_a_step_of_a_job_of_one_node_starts_its_ranks(
    slurm: SlurmSandbox, launch: list[str]
) -> None:
    step = ["srun", "-w", "nid001", "-n", "1", "-c", "2"]
    command = [*step, *launch, "printenv", "SLURMD_NODENAME"]
    assert slurm.run(command).stdout.split() == ["nid001", "nid001"]


def test_a_rank_of_srun_does_not_launch(slurm: SlurmSandbox, launch: list[str]) -> None:
    done = slurm.run(["srun", "-n", "2", *launch, "echo", "started"], expect=None)
    assert done.returncode == 2
    assert done.stdout == ""
    for rank in range(2):
        assert f"this process is rank {rank} of 2 already (SLURM_PROCID)" in done.stderr
