"""Jobs of `ezpz submit` on a real Slurm: through its queue, its limits and its ends."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from chains import TWICE, Chain, goes_on, losses, words_arrive
from tests.conftest import lacking

RESUMED = Path(__file__).resolve().parents[1] / "worlds" / "resumed.py"


@pytest.fixture
def submit(slurm, tool, tmp_path):
    """Submit jobs of two nodes; what they leave is told by the record of their chain."""

    numbers = itertools.count()

    def read(files):
        words = ["sh", "-c", f"cat {files} 2>/dev/null"]
        return subprocess.run(words, capture_output=True, check=False).stdout.decode()

    class Submitted(Chain):
        def __init__(self, *words, expect=0, env=()):
            state = str(tmp_path / f"state-{next(numbers)}")
            super().__init__(read, state)
            self.env = {
                "EZPZ_STATE_DIR": state, "TORCH_DEVICE": "cpu",
                "EZPZ_SHARED_FOLDERS": sys.prefix,  # a clone may lie below /tmp
                **dict(env),
            }  # fmt: skip
            submit = [tool("ezpz"), "submit", "-N", "2", "--ppn", "1", *words]
            ended = slurm.run(submit, env=self.env, expect=expect)
            self.said = ended.stdout or ended.stderr

        def left(self):
            """Return the states of the jobs that are not over."""
            ids = ",".join(job["id"] for job in self.record["jobs"])
            return slurm.run(["squeue", "-h", "-o", "%T", "-j", ids], expect=None).stdout.split()

    return Submitted


def test_a_training_goes_on_from_job_to_job_bit_for_bit(slurm, tool, submit, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    # Nodes of the sandbox have no names that can be looked up.
    train = ["--env", "MASTER_ADDR=127.0.0.1", sys.executable, str(RESUMED)]
    chain = submit("--until-done", "--time", "2m", "--signal-before", "60s", *train, parts)
    told = goes_on(chain, (parts / "losses").read_text)

    job = ["salloc", "-Q", "-N", "2", "-t", "5", tool("ezpz-launch"), "--ppn", "1"]
    slurm.run([*job, *train, whole, str(len(told))], env={"TORCH_DEVICE": "cpu"})
    assert told == losses((whole / "losses").read_text())[0]
    chain.until(lambda _: not chain.left())  # nor is a successor


def test_a_time_limit_without_a_checkpoint_is_seen_through(slurm, submit):
    body = f'echo "$EZPZ_ATTEMPT" >"$EZPZ_PROGRESS_FILE"; {TWICE}'
    chain = submit("--until-done", "3", "--time", "1m", "sh", "-c", body)
    (first, *_) = chain.writes("here 0")["jobs"]
    # Limits are whole minutes, and looked at twice a minute.
    slurm.run(["scontrol", "update", f"JobId={first['id']}", "EndTime=now+1"])
    record, _ = chain.ends("done", 2)
    assert len(record["jobs"]) == 3, "the third was in the queue"


def test_a_deleted_job_ends_its_chain(slurm, submit):
    body = ("sh", "-c", 'echo "here $EZPZ_RANK"; sleep 600')
    chains = [submit(*words, *body) for words in (["--until-done", "5"], ["--chain", "3"])]
    for chain in chains:
        slurm.run(["scancel", chain.writes("here 1")["jobs"][0]["id"]])
    for chain in chains:
        chain.ends("killed", 1)


def lose_a_node(slurm, job):
    nodes = slurm.run(["squeue", "-h", "-o", "%N", "-j", job]).stdout.strip()
    last = slurm.run(["scontrol", "show", "hostnames", nodes]).stdout.split()[-1]
    # It comes back when it registers again: ReturnToService=2.
    slurm.run(["scontrol", "update", f"nodename={last}", "state=down", "reason=test"])


@pytest.mark.parametrize("partitions", [("all", "all"), ("requeued", "cancelled")])
def test_jobs_that_had_to_go_are_another_attempt(slurm, submit, partitions):
    words = ("--until-done", "3", "--partition")
    chains = [submit(*words, partition, "sh", "-c", TWICE) for partition in partitions]
    first = [chain.writes("here 0")["jobs"][0]["id"] for chain in chains]
    if partitions[0] == "all":
        slurm.run(["scontrol", "requeue", first[0]])
        lose_a_node(slurm, first[1])
    else:  # preempted
        slurm.run(["sbatch", "--partition=high", "-N", "4", "--exclusive", "--wrap", "true"])
    for job in first[: partitions.count("all") or 1]:
        slurm.start_again(job)
    for chain, partition in zip(chains, partitions, strict=True):
        record, _ = chain.ends("done", 2)
        # One that is cancelled is not started again: the next job goes on.
        assert record["jobs"][partition == "cancelled"]["exit_status"] == 0


@pytest.mark.parametrize(("words", "message"), [
    (["--partition", "none"], "invalid partition specified: none"),
    (["-A", "closed"], "account closed has no hours left"),
    (["--submit-args", "--constraint=none"], "Invalid feature specification; asked for nodes 2"),
])  # fmt: skip
def test_what_slurm_refuses_is_said_in_its_words(sandbox, submit, words, message):
    if "closed" in words and not sandbox.LUA:
        lacking("this Slurm has no job_submit/lua, which refuses an account")
    assert message in submit(*words, "true", expect=2).said


def test_a_job_of_another_cluster_is_asked_for_and_ended_there(
    slurm, tool, submit, clusters, tmp_path
):
    words = ("--chain", "2", "--name", "far", "--submit-args", "--hold", "true")
    chain = submit(*words, env={**clusters, "SLURM_CLUSTERS": "sandbox"})
    first, second = (job["id"] for job in chain.record["jobs"])
    assert chain.record["cluster"] == "sandbox"
    assert chain.said.splitlines()[-1] == "  cluster sandbox"
    log = (tmp_path / "log").read_text()
    assert "sbatch sandbox --parsable " in log

    def ours(*words, env=(), **more):
        return slurm.run([tool("ezpz-launch"), *words], env={**chain.env, **dict(env)}, **more)

    # Here another cluster is the local one; and for who names it, too.
    for env in ({}, {"SLURM_CLUSTERS": "sandbox"}):
        listed = json.loads(ours("jobs", "--json", env={**clusters, **env}).stdout)
        (told,) = [each for each in listed if each["name"] == "far"]
        assert (told["id"], told["state"], told["cluster"]) == (first, "held", "sandbox")
    assert "no job '99999'" in ours("kill", "99999", env=clusters, expect=2).stderr
    (tmp_path / "log").write_text("")
    ours("kill", "far", env=clusters)
    assert f"scancel sandbox {second} {first}" in (tmp_path / "log").read_text()
    assert chain.left() == []


def test_a_chain_of_another_cluster_goes_on_there(submit, clusters, tmp_path):
    words = ("--until-done", "3", "--env-setup", str(tmp_path / "setup.sh"))
    env = {**clusters, "SBATCH_CLUSTERS": "sandbox", "SLURM_CLUSTERS": "sandbox"}
    chain = submit(*words, sys.executable, "-c", ENDS, env=env)
    record, _ = chain.ends("done", 2)
    assert record["cluster"] == "sandbox"
    chain.until(lambda _: not chain.left())


ENDS = "import os, sys; sys.exit(75 * (os.environ['EZPZ_ATTEMPT'] == '0'))"


def test_words_arrive_byte_for_byte(submit):
    words_arrive(submit)
