"""What ezpz_topo says of jobs, steps and their hosts, held to what scontrol says of them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.slurm.sandbox import SlurmSandbox

Report = dict[str, Any]
Say = Callable[..., list[Report]]

JOB = ("salloc", "-Q", "-N", "2", "-n", "4")
HET_JOB = ("salloc", "-Q", "-N", "1", "-n", "1", ":", "-N", "2", "-n", "3")

BARE = ("sh", "-c", 'exec env -i PATH="$PATH" SLURM_CONF="$SLURM_CONF" "$@"', "sh")
"""Go on as a shell that Slurm did not start, with none of a job's variables."""

NO_LIST = ("env", "-u", "SLURM_JOB_NODELIST", "-u", "SLURM_NODELIST")
NO_COMMANDS = ("env", "PATH=/nonexistent")


@pytest.fixture
def said_in(tmp_path: Path) -> Path:
    directory = tmp_path / "said"
    directory.mkdir()
    return directory


@pytest.fixture
def words(program: Callable[[str], list[str]], said_in: Path) -> list[str]:
    return [*program("say_topology"), str(said_in)]


@pytest.fixture
def say(slurm: SlurmSandbox, sandbox: ModuleType, words: list[str], said_in: Path) -> Say:
    """Start the program by the words given, and return what each process said."""

    def run(*launcher: str, then: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Any:
        # Whatever devices this host has, they are not the sandbox's.
        slurm.run([*launcher, *words, *then], env={"TORCH_DEVICE": "cpu", **(env or {})})
        return sandbox.reports(said_in)

    return run


@pytest.fixture
def batch(
    slurm: SlurmSandbox, sandbox: ModuleType, words: list[str], said_in: Path, tmp_path: Path
) -> Say:
    """Run a batch script that finds the program as ``say``, and return what each said."""
    program = tmp_path / "bin" / "say"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)

    def run(body: str, *options: str, env: dict[str, str] | None = None) -> Any:
        script = f'PATH={shlex.quote(str(program.parent))}:"$PATH"\n{body}'
        slurm.batch(script, *options, env={"TORCH_DEVICE": "cpu", **(env or {})})
        return sandbox.reports(said_in)

    return run


@pytest.fixture
def renamed() -> Callable[[str], tuple[str, ...]]:
    """Return words that go on where the host's name is a node's, as it is on a real machine."""
    # A namespace is this process's own: nobody else sees the name.
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        reason = "unshare --uts fails: a process may have no host name of its own here"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    script = 'hostname "$1" && shift && exec "$@"'
    return lambda node: ("unshare", "--uts", "sh", "-c", script, "sh", node)


@pytest.fixture
def own_name(renamed: Callable[[str], tuple[str, ...]]) -> tuple[str, ...]:
    """Words that go on where the host's name is that of the process's own node."""
    return ("sh", "-c", f'exec {shlex.join(renamed("")[:-1])} "$SLURMD_NODENAME" "$@"', "sh")


def row(said: Report) -> tuple[str, int, int, int, int | None, int | None]:
    """Return launcher, rank, world size, local rank, local world size, node rank."""
    names = ("launcher", "rank", "world_size", "local_rank", "local_world_size", "node_rank")
    launcher, *numbers = (said["rank_info"][name] for name in names)
    return (launcher, *numbers)


def slurm_row(rank: int, size: int, local: int, local_size: int, node: int) -> Any:
    return ("slurm", rank, size, local, local_size, node)


def hosts(said: Report) -> list[str]:
    """Return the hosts that every answer agrees on."""
    found: list[str] = said["allocation"]["hosts"]
    assert [entry["host"] for entry in said["hosts"]["entries"]] == found
    assert said["num_nodes"] == len(found)
    return found


def ends(said: Report) -> float:
    return datetime.fromisoformat(said["allocation"]["ends_at"]).timestamp()


def assert_one_process_of_the_job(said: Report, slots: list[int] | None, *, on_node: bool) -> None:
    assert row(said) == ("none", 0, 1, 0, 1, 0)
    assert hosts(said) == said["scontrol"]["job"]
    job = said["allocation"]
    assert (job["scheduler"], job["job_id"]) == ("slurm", said["env"]["SLURM_JOB_ID"])
    assert (job["slots"], job["on_node"]) == (slots, on_node)
    assert (said["node_index"], said["in_use"]) == (0, 1)
    assert said["total"] == (sum(slots) if slots else len(hosts(said)))


def assert_ranks_of_a_step(said: list[Report]) -> None:
    """Every rank knows the step's hosts in Slurm's order, its own among them, and their tasks."""
    assert [one["rank"] for one in said] == list(range(len(said)))
    tasks = Counter(one["env"]["SLURMD_NODENAME"] for one in said)
    for one in said:
        assert one["rank_info"]["launcher"] == "slurm"
        assert hosts(one) == one["scontrol"]["step"]
        assert hosts(one)[one["node_index"]] == one["env"]["SLURMD_NODENAME"]
        assert one["allocation"]["slots"] == [tasks[host] for host in hosts(one)]
        assert one["allocation"]["on_node"] is True
        assert one["in_use"] == one["total"] == len(said)
        assert one["rank_info"]["local_world_size"] == tasks[one["env"]["SLURMD_NODENAME"]]


def test_a_batch_script(batch: Say) -> None:
    (said,) = batch("say", "-N", "2", "-n", "3", "-J", "two words", "-p", "all")
    assert_one_process_of_the_job(said, [2, 1], on_node=True)
    assert (said["allocation"]["name"], said["allocation"]["queue"]) == ("two words", "all")
    assert said["allocation"]["ends_at"] is None, "22.05.8 tells it by no variable"


def test_a_batch_script_that_asked_for_nodes_only(batch: Say) -> None:
    (said,) = batch("say", "-N", "3")
    # SLURM_TASKS_PER_NODE is 1(x3) all the same.
    assert_one_process_of_the_job(said, None, on_node=True)


def test_a_batch_script_that_a_step_has_submitted(batch: Say, say: Say, said_in: Path) -> None:
    # sbatch hands on the variables of the step that it runs in.
    (step,) = say("srun", "-N", "1", "-n", "1")
    for file in said_in.iterdir():
        file.unlink()
    (said,) = batch("say", "-N", "2", "-n", "4", env=step["env"])
    assert said["env"]["SLURM_STEP_ID"] == "0", "Slurm's trap"
    assert row(said) == ("none", 0, 1, 0, 1, 0)
    assert hosts(said) == said["scontrol"]["job"]
    assert len(hosts(said)) == 2


def test_a_salloc_shell_is_on_no_node(say: Say) -> None:
    (said,) = say("salloc", "-Q", "-N", "3", "-n", "5")
    assert_one_process_of_the_job(said, [2, 2, 1], on_node=False)


def test_a_salloc_shell_on_a_node_of_its_own_job(
    say: Say, renamed: Callable[[str], tuple[str, ...]]
) -> None:
    (said,) = say("salloc", "-Q", "-w", "nid001,nid002", "-n", "4", *renamed("nid002"))
    assert_one_process_of_the_job(said, [2, 2], on_node=True)


def test_an_interactive_step_stands_for_the_whole_job(say: Say) -> None:
    (said,) = say(*JOB, "srun", "--interactive", "-N", "1", "-n", "1")
    assert said["scontrol"]["step"] == said["scontrol"]["job"][:1], "Slurm's trap"
    assert_one_process_of_the_job(said, None, on_node=True)


def test_a_step_within_an_interactive_step(say: Say) -> None:
    said = say(*JOB, "srun", "--interactive", "-N", "1", "-n", "1", "srun", "-N", "2", "-n", "4")
    assert_ranks_of_a_step(said)
    assert hosts(said[0]) == said[0]["scontrol"]["job"]


@pytest.mark.parametrize(
    "options",
    [
        ("-N", "2", "-n", "4"),
        ("-N", "2", "-n", "4", "--distribution", "cyclic"),
        ("-N", "2", "-n", "4", "--mpi=pmi2"),
        ("-N", "3", "-n", "5"),
        ("-n", "5", "--distribution", "arbitrary", "-w", "nid003,nid001,nid001,nid004,nid003"),
        ("-N", "1", "-n", "1"),
    ],
    ids=["block", "cyclic", "pmi2", "uneven", "arbitrary", "one task"],
)
def test_the_ranks_of_a_step(say: Say, options: tuple[str, ...]) -> None:
    said = say("srun", *options)
    assert_ranks_of_a_step(said)
    assert hosts(said[0]) == said[0]["scontrol"]["job"]


def test_a_step_on_other_nodes_than_the_first(say: Say) -> None:
    job = ("salloc", "-Q", "-w", "nid001,nid002,nid003", "-n", "6")
    said = say(*job, "srun", "-w", "nid002,nid003", "-N", "2", "-n", "3")
    assert_ranks_of_a_step(said)
    assert hosts(said[0]) == ["nid002", "nid003"]
    assert said[0]["scontrol"]["job"] == ["nid001", "nid002", "nid003"]


def test_the_shell_of_a_heterogeneous_job(say: Say) -> None:
    (said,) = say(*HET_JOB, then=("--ask",))
    assert_one_process_of_the_job(said, None, on_node=False)
    assert len(hosts(said)) == 3
    assert said["allocation"]["queue"] == "all"
    assert ends(said) == int(said["scontrol"]["end"])


@pytest.mark.parametrize(("groups", "nodes"), [("1", 2), ("0,1", 3)])
def test_a_step_of_a_heterogeneous_job(say: Say, groups: str, nodes: int) -> None:
    said = say(*HET_JOB, "srun", f"--het-group={groups}")
    assert_ranks_of_a_step(said)
    assert len(hosts(said[0])) == nodes
    assert hosts(said[0]) == said[0]["scontrol"]["job"][-nodes:]


def test_mpiexec_across_nodes(say: Say, tool: Callable[[str], str]) -> None:
    said = say(*JOB, tool("mpiexec"), "-iface", "lo", "-n", "4")
    assert [row(one)[:3] for one in said] == [("pmi", rank, 4) for rank in range(4)]
    for one in said:
        assert hosts(one) == one["scontrol"]["job"]
        assert hosts(one)[one["node_index"]] == one["env"]["SLURMD_NODENAME"]
        assert one["in_use"] == one["total"] == 4


def test_mpiexec_across_nodes_finds_its_node_by_the_hosts_name(
    say: Say, tool: Callable[[str], str], own_name: tuple[str, ...]
) -> None:
    # As it starts over ssh: no slurmd tells the node's name.
    unnamed = ("env", "-u", "SLURMD_NODENAME")
    said = say(*JOB, tool("mpiexec"), "-iface", "lo", "-n", "4", *own_name, *unnamed)
    assert [one["node_index"] for one in said] == [0, 0, 1, 1]
    for one in said:
        assert hosts(one)[one["node_index"]] == one["hostname"]


@pytest.mark.parametrize(
    "env",
    [{}, {"TZ": "IST-5:30"}, {"TZ": "XXX+11"}, {"SLURM_TIME_FORMAT": "relative"},
     {"SLURM_TIME_FORMAT": "%s", "TZ": "IST-5:30"}],
    ids=["plain", "east", "west", "relative", "seconds"],
)  # fmt: skip
def test_the_end_of_the_walltime_is_scontrols(say: Say, env: dict[str, str]) -> None:
    (said,) = say("salloc", "-Q", "-N", "1", "-t", "7", then=("--ask",), env=env)
    assert ends(said) == int(said["scontrol"]["end"])
    assert said["allocation"]["sources"]["ends_at"] == "scontrol show job"


@pytest.mark.parametrize("limit", ["3", "UNLIMITED"])
def test_a_time_limit_that_was_changed(say: Say, limit: str) -> None:
    update = f'scontrol update job "$SLURM_JOB_ID" TimeLimit={limit} && exec "$@"'
    (said,) = say("salloc", "-Q", "-N", "1", "sh", "-c", update, "sh", then=("--ask",))
    if limit == "UNLIMITED":
        assert said["scontrol"]["end"] == "Unknown"
        assert said["allocation"]["ends_at"] is None
    else:
        assert ends(said) == int(said["scontrol"]["end"])


def test_a_rank_may_ask_too(say: Say) -> None:
    said = say("srun", "-N", "2", "-n", "2", then=("--ask",))
    assert [ends(one) for one in said] == [int(one["scontrol"]["end"]) for one in said]
    assert_ranks_of_a_step(said)


def test_who_does_not_ask_starts_no_command(say: Say) -> None:
    for one in say("srun", "-N", "2", "-n", "4"):
        assert one["started_commands"] is False
        assert one["allocation"]["ends_at"] is None


@pytest.mark.parametrize("launcher", [("salloc", "-Q"), ("srun",)], ids=["shell", "step"])
def test_who_does_not_ask_needs_no_command(say: Say, launcher: tuple[str, ...]) -> None:
    (said,) = say(*launcher, "-w", "nid002", "-n", "1", *NO_COMMANDS, then=("--no-scontrol",))
    assert hosts(said) == ["nid002"]
    assert said["allocation"]["notes"] == []


def test_an_end_that_nobody_tells_is_noted(say: Say) -> None:
    (said,) = say("salloc", "-Q", "-w", "nid002", *NO_COMMANDS, then=("--ask", "--no-scontrol"))
    assert hosts(said) == ["nid002"]
    assert said["allocation"]["ends_at"] is None
    (note,) = said["allocation"]["notes"]
    assert note.startswith("end of the walltime: 'scontrol' cannot be started")


def test_variables_without_a_nodelist(say: Say) -> None:
    (said,) = say("salloc", "-Q", "-N", "3", "-J", "two words", *NO_LIST)
    assert_one_process_of_the_job(said, None, on_node=False)
    job = said["allocation"]
    assert (job["name"], job["queue"]) == ("two words", "all")
    assert set(job["sources"].values()) == {"scontrol show job", "uname, and no SLURMD_NODENAME"}
    assert ends(said) == int(said["scontrol"]["end"])


def test_a_heterogeneous_job_without_a_nodelist(say: Say) -> None:
    (said,) = say(*HET_JOB, "env", "-u", "SLURM_JOB_NODELIST_HET_GROUP_1")
    assert_one_process_of_the_job(said, None, on_node=False)
    assert len(hosts(said)) == 3


def test_variables_without_a_nodelist_and_no_scontrol(say: Say) -> None:
    (said,) = say("salloc", "-Q", "-N", "2", *NO_LIST, *NO_COMMANDS, then=("--no-scontrol",))
    for answer in (said["allocation"], said["num_nodes"], said["hosts"]):
        assert answer.startswith("SchedulerError: 'scontrol' cannot be started")
        assert "PATH='/nonexistent'" in answer


def test_an_array_task_without_a_nodelist(batch: Say, tmp_path: Path) -> None:
    # The last task has the array's own id, and for that scontrol tells of every task.
    end = shlex.quote(str(tmp_path / "end"))
    body = f"""
        if [ "$SLURM_JOB_ID" != "$SLURM_ARRAY_JOB_ID" ]; then
            until [ -e {end} ]; do sleep 0.1; done
        else
            trap 'touch {end}' EXIT
            {shlex.join(NO_LIST)} say --job-of "$SLURM_JOB_NODELIST"
        fi
    """
    (said,) = batch(body, "--array=0-1", "-N", "1", "-n", "2")
    (node,) = said["scontrol"]["job"]
    assert said["job_of"][node]["hosts"] == [node]
    assert hosts(said) == [node]


def test_a_step_without_a_nodelist_is_not_taken_for_the_whole_job(say: Say) -> None:
    job = ("salloc", "-Q", "-w", "nid001,nid002", "-n", "4")
    step = ("srun", "-w", "nid002", "-N", "1", "-n", "1")
    (said,) = say(*job, *step, "env", "-u", "SLURM_STEP_NODELIST", then=("--no-scontrol",))
    answer = said["allocation"]
    if isinstance(answer, str):
        assert "SLURM_STEP_NODELIST" in answer
    else:
        assert answer["hosts"] == ["nid002"]


def test_a_name_of_several_lines(say: Say) -> None:
    name = "two\n   NodeList=nid004"
    (said,) = say("salloc", "-Q", "-w", "nid001", "-J", name, *NO_LIST)
    assert hosts(said) == ["nid001"]


def test_a_shell_without_variables_finds_the_job_of_its_node(say: Say) -> None:
    job = ("salloc", "-Q", "-w", "nid001,nid002", "-J", "two words", "-t", "7")
    (said,) = say(*job, *BARE, then=("--job-of", "nid001", "--job-of", "nid002.cluster.example",
                                     "--job-of", "nid003"))  # fmt: skip
    found = said["job_of"]["nid001"]
    other = said["job_of"]["nid002.cluster.example"]
    assert (found["node_name"], other["node_name"]) == ("nid001", "nid002")
    assert {**found, "node_name": "nid002"} == other
    assert found["hosts"] == said["scontrol"]["job"] == ["nid001", "nid002"]
    assert (found["name"], found["queue"]) == ("two words", "all")
    assert datetime.fromisoformat(found["ends_at"]).timestamp() == int(said["scontrol"]["end"])
    assert said["job_of"]["nid003"] is None
    assert said["allocation"]["scheduler"] == "none", "nobody was asked"


def test_a_shell_without_variables_on_a_node_asks_by_itself(
    say: Say, renamed: Callable[[str], tuple[str, ...]]
) -> None:
    job = ("salloc", "-Q", "-w", "nid001,nid002")
    (said,) = say(*job, *BARE, *renamed("nid002"), then=("--ask",))
    assert said["allocation"]["scheduler"] == "slurm"
    assert said["allocation"]["hosts"] == ["nid001", "nid002"]
    assert said["allocation"]["on_node"] is True
    assert row(said) == ("none", 0, 1, 0, 1, 0)


def test_a_shell_without_variables_and_without_a_job(say: Say) -> None:
    (said,) = say(then=("--ask", "--job-of", "nid001"))
    assert said["job_of"] == {"nid001": None}
    assert said["allocation"]["scheduler"] == "none"
    assert "no scheduler here has a running job" in said["allocation"]["sources"]["scheduler"]


def test_two_jobs_on_one_node(
    slurm: SlurmSandbox, sandbox: ModuleType, words: list[str], said_in: Path
) -> None:
    job = ("salloc", "-Q", "-w", "nid001", "-n", "1", "sh", "-c")
    outer = (*job, 'echo "$SLURM_JOB_ID"; unset SLURM_JOB_ID; exec "$@"', "sh")
    inner = (*job, 'echo "$SLURM_JOB_ID"; exec "$@"', "sh", *BARE)
    jobs = slurm.run([*outer, *inner, *words, "--job-of", "nid001"]).stdout.split()
    (said,) = sandbox.reports(said_in)
    error = said["job_of"]["nid001"]
    assert error.startswith("SchedulerError: host nid001 is in 2 running jobs: ")
    assert len(set(jobs)) == 2
    assert all(job in error for job in jobs)


def test_a_heterogeneous_job_is_whole_from_each_of_its_nodes(say: Say) -> None:
    each = ("--job-of", "nid001", "--job-of", "nid002", "--job-of", "nid003")
    job = ("salloc", "-Q", "-w", "nid001", "-n", "1", ":", "-w", "nid002,nid003", "-n", "3")
    (said,) = say(*job, *BARE, then=each)
    assert [found["hosts"] for found in said["job_of"].values()] == [
        ["nid001", "nid002", "nid003"]
    ] * 3


def test_srun_within_a_rank_of_ezpz_launch(batch: Say, tool: Callable[[str], str]) -> None:
    launch = f"{tool('ezpz-launch')} -n 1"
    said = batch(f"{launch} srun --overlap -N 1 -n 2 say", "-N", "1", "-n", "2")
    assert [row(one) for one in said] == [slurm_row(0, 2, 0, 2, 0), slurm_row(1, 2, 1, 2, 0)]
    assert_ranks_of_a_step(said)
    for one in said:
        assert (one["env"]["EZPZ_RANK"], one["env"]["EZPZ_WORLD_SIZE"]) == ("0", "1"), "inherited"
        assert "slurm before ezpz" in one["rank_info"]["notes"][0]


def test_srun_across_nodes_within_mpiexec(say: Say, tool: Callable[[str], str]) -> None:
    outer = (tool("mpiexec"), "-iface", "lo", "-n", "1")
    said = say(*JOB, *outer, "srun", "--overlap", "-N", "2", "-n", "4")
    assert {one["env"]["PMI_SIZE"] for one in said} == {"1"}, "inherited"
    assert_ranks_of_a_step(said)
    assert hosts(said[0]) == said[0]["scontrol"]["job"]


def test_srun_with_pmi2_within_mpiexec(say: Say, tool: Callable[[str], str]) -> None:
    # PMI_RANK is srun's, beside it MPI_LOCALRANKID of the rank above.
    outer = (tool("mpiexec"), "-iface", "lo", "-n", "1")
    said = say(*JOB, *outer, "srun", "--mpi=pmi2", "--overlap", "-N", "2", "-n", "4")
    assert [(one["env"]["PMI_RANK"], one["env"]["MPI_LOCALRANKID"]) for one in said] == [
        (str(rank), "0") for rank in range(4)
    ]
    assert_ranks_of_a_step(said)


def test_steps_that_give_ranks_the_numbers_that_they_inherit(
    say: Say, tool: Callable[[str], str]
) -> None:
    # Rank 1 of 2 starts a step, and that has a rank 1 of 2 on another node.
    outer = (tool("mpiexec"), "-iface", "lo", "-n", "2", "-ppn", "2")
    said = say(*JOB, *outer, "srun", "--overlap", "-N", "2", "-n", "2")
    for one in said:
        assert row(one) == slurm_row(one["rank"], 2, 0, 1, one["rank"])


def test_mpiexec_within_a_step_of_one_task(say: Say, tool: Callable[[str], str]) -> None:
    # Hydra would start its proxies by srun, which waits for what this step has.
    inner = (tool("mpiexec"), "-launcher", "fork", "-iface", "lo", "-n", "2")
    said = say("srun", "-N", "1", "-n", "1", "-c", "2", *inner)
    assert [row(one) for one in said] == [("pmi", 0, 2, 0, 2, 0), ("pmi", 1, 2, 1, 2, 0)]
    assert {one["env"]["SLURM_STEP_NUM_TASKS"] for one in said} == {"1"}, "inherited"
    assert {one["num_nodes"] for one in said} == {1}


def test_mpiexec_within_each_rank_of_a_step(say: Say, tool: Callable[[str], str]) -> None:
    inner = (tool("mpiexec"), "-launcher", "fork", "-iface", "lo", "-n", "1")
    said = say("srun", "-N", "1", "-n", "2", *inner)
    assert [row(one) for one in said] == [("pmi", 0, 1, 0, 1, 0)] * 2
    assert {one["env"]["SLURM_PROCID"] for one in said} == {"0", "1"}, "inherited"


def test_mpiexec_within_a_stamped_rank(batch: Say, tool: Callable[[str], str]) -> None:
    inner = f"{tool('mpiexec')} -launcher fork -iface lo -n 2"
    said = batch(f"{tool('ezpz-launch')} -n 1 {inner} say", "-N", "1", "-n", "2")
    assert [row(one) for one in said] == [("pmi", 0, 2, 0, 2, 0), ("pmi", 1, 2, 1, 2, 0)]
    assert {one["env"]["EZPZ_WORLD_SIZE"] for one in said} == {"1"}, "inherited"


def test_ezpz_launch_within_a_step_of_one_task(say: Say, tool: Callable[[str], str]) -> None:
    job = ("salloc", "-Q", "-w", "nid001,nid002", "-n", "4")
    step = ("srun", "-w", "nid002", "-N", "1", "-n", "1", "-c", "2")
    said = say(*job, *step, tool("ezpz-launch"), "-n", "2")
    assert [row(one) for one in said] == [("ezpz", 0, 2, 0, 2, 0), ("ezpz", 1, 2, 1, 2, 0)]
    assert [(hosts(one), one["node_index"]) for one in said] == [(["nid002"], 0)] * 2


def test_ezpz_topo_of_every_rank(
    slurm: SlurmSandbox, tool: Callable[[str], str], tmp_path: Path
) -> None:
    slurm.run(["srun", "-w", "nid001,nid003", "-n", "2", "--output", str(tmp_path / "%t"),
               tool("ezpz-topo"), "--json"])  # fmt: skip
    for rank in range(2):
        said = json.loads((tmp_path / str(rank)).read_text(encoding="utf-8"))
        assert said["hosts"] == {"value": "nid[001,003]", "source": "SLURM_STEP_NODELIST"}
        assert said["rank"] == {"value": rank, "source": "SLURM_PROCID"}
        assert said["node_index"] == {"value": rank, "source": "SLURM_NODEID"}
        assert (said["launcher"]["value"], said["world_size"]["value"]) == ("slurm", 2)
        assert (said["nodes"]["value"], said["slots"]["value"]) == (2, 2)
        assert said["ends_at"]["value"] is None
        assert said["notes"] == []


def test_ezpz_topo_asks_in_a_batch_script(slurm: SlurmSandbox, tool: Callable[[str], str]) -> None:
    end = 'SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e'
    options = ("-N", "2", "-n", "3", "-J", "two words")
    *table, seconds = slurm.batch(f"{tool('ezpz-topo')} --ask\n{end}", *options).splitlines()
    (line,) = [line for line in table if line.startswith("ends at ")]
    assert line.endswith("  scontrol show job")
    assert datetime.fromisoformat(line.split()[2]).timestamp() == int(seconds)
    rows = [" ".join(line.split()) for line in table]
    assert "scheduler slurm SLURM_JOB_ID" in rows
    assert "job name two words SLURM_JOB_NAME" in rows
    assert "slots 3 SLURM_TASKS_PER_NODE" in rows
    assert any(line.startswith("launcher none ") for line in rows)


def test_the_hostfile_of_a_job(say: Say, slurm: SlurmSandbox, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    before = set(slurm.directory.iterdir())
    env = {"TMPDIR": str(place), "XDG_RUNTIME_DIR": "", "HOSTFILE": ""}
    steps = '"$@"; srun -N 2 -n 4 "$@"; srun -N 1 -n 2 "$@"'
    said = say(*JOB, "sh", "-ec", steps, "sh", then=("--hostfile",), env=env)
    assert set(slurm.directory.iterdir()) == before, "nothing in the working directory"
    files: dict[str | None, set[str]] = {}
    for one in said:
        file = one["hostfile"]
        assert file["lines"] == hosts(one)
        assert file["modes"] == ["0o600", "0o700"]
        assert Path(file["path"]).parent.parent == place
        files.setdefault(one["env"].get("SLURM_STEP_ID"), set()).add(file["path"])
    assert {step: len(paths) for step, paths in files.items()} == {None: 1, "0": 1, "1": 1}
    assert files[None] == files["0"] != files["1"], "the same hosts, the same file"
