"""What ezpz_topo asks of scontrol and squeue: walltime, and whatever no variable tells."""

import shlex
from datetime import datetime

import pytest
from tests.slurm.topology import (
    HET_JOB,
    assert_one_process_of_the_job,
    ends,
    hosts,
    row,
)

BARE = ("sh", "-c", 'exec env -i PATH="$PATH" SLURM_CONF="$SLURM_CONF" "$@"', "sh")
"""Go on as a shell that Slurm did not start, with none of a job's variables."""

NO_LIST = ("env", "-u", "SLURM_JOB_NODELIST", "-u", "SLURM_NODELIST")
NO_COMMANDS = ("env", "PATH=/nonexistent")


@pytest.mark.parametrize(
    "env", [{}, {"SLURM_TIME_FORMAT": "relative", "TZ": "IST-5:30"}], ids=["plain", "east"]
)
def test_the_end_of_the_walltime_is_scontrols(say, env):
    (said,) = say("salloc", "-Q", "-N", "1", "-t", "7", then=("--ask",), env=env)
    assert ends(said) == int(said["scontrol"]["end"])
    assert said["allocation"]["sources"]["ends_at"] == "scontrol show job"


def test_a_job_without_a_time_limit(say):
    update = 'scontrol update job "$SLURM_JOB_ID" TimeLimit=UNLIMITED && exec "$@"'
    (said,) = say("salloc", "-Q", "-N", "1", "sh", "-c", update, "sh", then=("--ask",))
    assert said["scontrol"]["end"] == "Unknown"
    assert said["allocation"]["ends_at"] is None


def test_an_end_that_nobody_tells_is_noted(say):
    (said,) = say("salloc", "-Q", "-w", "nid002", *NO_COMMANDS, then=("--ask", "--no-scontrol"))
    assert hosts(said) == ["nid002"]
    assert said["allocation"]["ends_at"] is None
    (note,) = said["allocation"]["notes"]
    assert note.startswith("end of the walltime: 'scontrol' cannot be started")


def test_variables_without_a_nodelist(say):
    (said,) = say("salloc", "-Q", "-N", "3", "-J", "two words", *NO_LIST)
    assert_one_process_of_the_job(said, None, on_node=False)
    job = said["allocation"]
    assert (job["name"], job["queue"]) == ("two words", "all")
    assert set(job["sources"].values()) == {"scontrol show job", "uname, and no SLURMD_NODENAME"}
    assert ends(said) == int(said["scontrol"]["end"])


def test_a_heterogeneous_job_without_a_nodelist(say):
    (said,) = say(*HET_JOB, "env", "-u", "SLURM_JOB_NODELIST_HET_GROUP_1", then=("--ask",))
    assert_one_process_of_the_job(said, None, on_node=False)
    assert len(hosts(said)) == 3
    assert said["allocation"]["queue"] == "all"
    assert ends(said) == int(said["scontrol"]["end"])


def test_an_array_task_without_a_nodelist(batch, tmp_path):
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


def test_a_step_without_a_nodelist_is_not_taken_for_the_whole_job(say):
    job = ("salloc", "-Q", "-w", "nid001,nid002", "-n", "4")
    step = ("srun", "-w", "nid002", "-N", "1", "-n", "1")
    (said,) = say(*job, *step, "env", "-u", "SLURM_STEP_NODELIST", then=("--no-scontrol",))
    answer = said["allocation"]
    if isinstance(answer, str):
        assert "SLURM_STEP_NODELIST" in answer
    else:
        assert answer["hosts"] == ["nid002"]


def test_a_name_of_several_lines(say):
    name = "two\n   NodeList=nid004"
    (said,) = say("salloc", "-Q", "-w", "nid001", "-J", name, *NO_LIST)
    assert hosts(said) == ["nid001"]


def test_a_shell_without_variables_finds_the_job_of_its_node(say):
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


def test_a_shell_without_variables_on_a_node_asks_by_itself(say, renamed):
    job = ("salloc", "-Q", "-w", "nid001,nid002")
    (said,) = say(*job, *BARE, *renamed("nid002"), then=("--ask",))
    assert said["allocation"]["scheduler"] == "slurm"
    assert said["allocation"]["hosts"] == ["nid001", "nid002"]
    assert said["allocation"]["on_node"] is True
    assert row(said) == ("none", 0, 1, 0, 1, 0)


def test_two_jobs_on_one_node(slurm, sandbox, words, said_in):
    job = ("salloc", "-Q", "-w", "nid001", "-n", "1", "sh", "-c")
    outer = (*job, 'echo "$SLURM_JOB_ID"; unset SLURM_JOB_ID; exec "$@"', "sh")
    inner = (*job, 'echo "$SLURM_JOB_ID"; exec "$@"', "sh", *BARE)
    jobs = slurm.run([*outer, *inner, *words, "--job-of", "nid001"]).stdout.split()
    (said,) = sandbox.reports(said_in)
    error = said["job_of"]["nid001"]
    assert error.startswith("SchedulerError: host nid001 is in 2 running jobs: ")
    assert len(set(jobs)) == 2
    assert all(job in error for job in jobs)


def test_a_heterogeneous_job_is_whole_from_each_of_its_nodes(say):
    job = ("salloc", "-Q", "-w", "nid001", "-n", "1", ":", "-w", "nid002,nid003", "-n", "3")
    (said,) = say(*job, *BARE, then=("--job-of", "nid001", "--job-of", "nid003"))
    every = ["nid001", "nid002", "nid003"]
    assert [found["hosts"] for found in said["job_of"].values()] == [every, every]


def test_ezpz_topo_asks_in_a_batch_script(slurm, tool):
    end = 'SLURM_TIME_FORMAT=%s squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e'
    *table, seconds = slurm.batch(f"{tool('ezpz-topo')} --ask\n{end}").splitlines()
    (line,) = [line for line in table if line.startswith("ends at ")]
    assert line.endswith("  scontrol show job")
    assert datetime.fromisoformat(line.split()[2]).timestamp() == int(seconds)
