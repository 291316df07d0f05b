"""Jobs of `ezpz submit` on a real Slurm: through its queue, its limits and its ends."""

import json
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import lacking

RESUMED = Path(__file__).resolve().parents[1] / "worlds" / "resumed.py"


@pytest.fixture
def submit(slurm, tool, tmp_path):
    """Submit jobs of two nodes; what they leave is told by the record of their chain."""

    class Submitted:
        def __init__(self, *words, expect=0):
            self.env = {
                "EZPZ_STATE_DIR": str(tmp_path / "state"), "TORCH_DEVICE": "cpu",
                "EZPZ_SHARED_FOLDERS": sys.prefix,  # a clone may lie below /tmp
            }  # fmt: skip
            submit = [tool("ezpz"), "submit", "-N", "2", "--ppn", "1", *words]
            ended = slurm.run(submit, env=self.env, expect=expect)
            self.said = ended.stdout or ended.stderr

        @property
        def record(self):
            (path,) = (tmp_path / "state" / "jobs").glob("*.json")
            return json.loads(path.read_text(encoding="utf-8"))

        def until(self, condition, seconds=400):
            """Wait until the record is as wanted; return it, and what its jobs wrote."""
            end = time.monotonic() + seconds
            while not condition(record := self.record):
                assert time.monotonic() < end, (record, self.output(record))
                time.sleep(0.2)
            return record, self.output(record)

        def output(self, record):
            files = [Path(record["output"].replace("%j", job["id"])) for job in record["jobs"]]
            return "\n".join(file.read_bytes().decode() for file in files if file.exists())

        def ended(self):
            return self.until(lambda record: record["outcome"])

        def left(self):
            """Return the states of the jobs that are not over."""
            ids = ",".join(job["id"] for job in self.record["jobs"])
            return slurm.run(["squeue", "-h", "-o", "%T", "-j", ids], expect=None).stdout.split()

    return Submitted


def losses(folder):
    """Return the loss of each step, and the attempts that they are of."""
    lines = [line.split() for line in (folder / "losses").read_text().splitlines()]
    told = {int(step): loss for step, loss, _ in lines}
    assert sorted(told) == list(range(1, len(told) + 1))
    return told, {attempt for *_, attempt in lines}


def test_a_training_goes_on_from_job_to_job_bit_for_bit(slurm, tool, submit, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    # Nodes of the sandbox have no names that can be looked up.
    train = ["--env", "MASTER_ADDR=127.0.0.1", sys.executable, str(RESUMED)]
    chain = submit("--until-done", "--time", "3m", "--signal-before", "2m", *train, parts)
    record, said = chain.ended()
    assert record["outcome"] == "done", f"{record}\n{said}"
    assert 75 in [job["exit_status"] for job in record["jobs"]]
    told, attempts = losses(parts)
    assert len(attempts) == 2
    assert record["best"] > 5

    job = ["salloc", "-Q", "-N", "2", "-t", "5", tool("ezpz-launch"), "--ppn", "1"]
    slurm.run([*job, *train, whole, str(len(told))], env={"TORCH_DEVICE": "cpu"}, timeout=300)
    assert told == losses(whole)[0]
    chain.until(lambda _: not chain.left())  # nor is a successor


def test_a_time_limit_without_a_checkpoint_is_seen_through(submit):
    body = '[ "$EZPZ_ATTEMPT" = 1 ] && exit 0; echo 1 >"$EZPZ_PROGRESS_FILE"; sleep 600'
    record, said = submit("--until-done", "3", "--time", "1m", "sh", "-c", body).ended()
    assert (record["outcome"], record["attempts"]) == ("done", 2), said
    assert len(record["jobs"]) == 3, "the third was in the queue"


@pytest.mark.parametrize("words", [["--until-done", "5"], ["--chain", "3"]])
def test_a_deleted_job_ends_its_chain(slurm, submit, words):
    chain = submit(*words, "sh", "-c", 'echo "here $EZPZ_RANK"; sleep 600')
    record, _ = chain.until(lambda record: "here 1" in chain.output(record))
    slurm.run(["scancel", record["jobs"][0]["id"]])
    record, said = chain.ended()
    assert record["outcome"] == "killed", said
    assert record["attempts"] == 1


def requeue(slurm, job):
    slurm.run(["scontrol", "requeue", job])


def preempt(slurm, _):
    slurm.run(["sbatch", "--partition=high", "-N", "4", "--exclusive", "--wrap", "true"])


def lose_a_node(slurm, job):
    nodes = slurm.run(["squeue", "-h", "-o", "%N", "-j", job]).stdout.strip()
    last = slurm.run(["scontrol", "show", "hostnames", nodes]).stdout.split()[-1]
    # It comes back when it registers again: ReturnToService=2.
    slurm.run(["scontrol", "update", f"nodename={last}", "state=down", "reason=test"])


@pytest.mark.parametrize(("partition", "act", "of_job"), [
    ("all", requeue, 0), ("all", lose_a_node, 0), ("requeued", preempt, 0),
    ("cancelled", preempt, 1),
])  # fmt: skip
def test_a_job_that_had_to_go_is_another_attempt(slurm, submit, partition, act, of_job):
    body = 'echo "here $EZPZ_ATTEMPT"; [ "$EZPZ_ATTEMPT" = 1 ] || sleep 600'
    chain = submit("--until-done", "3", "--partition", partition, "sh", "-c", body)
    record, _ = chain.until(lambda record: "here 0" in chain.output(record))
    first = record["jobs"][0]["id"]
    act(slurm, first)
    if of_job == 0:
        slurm.start_again(first)
    record, said = chain.ended()
    assert (record["outcome"], record["attempts"]) == ("done", 2), said
    assert record["jobs"][of_job]["exit_status"] == 0


@pytest.mark.parametrize(("words", "message"), [
    (["--partition", "none"], "--queue none: no such queue; expected one of all (1 to 4 nodes, up"),
    (["--time", "2h"], "jobs of all may run for 1:00:00"),
    (["-A", "closed"], "account closed has no hours left"),
    (["-A", "closed"], "asked for nodes 2, queue all, account closed; expected"),
    (["--submit-args", "--constraint=none"], "Invalid feature specification; asked for nodes 2"),
])  # fmt: skip
def test_what_slurm_refuses_is_said_in_its_words(sandbox, submit, words, message):
    if "closed" in words and not sandbox.LUA:
        lacking("this Slurm has no job_submit/lua, which refuses an account")
    assert message in submit(*words, "true", expect=2).said


def test_words_arrive_byte_for_byte(submit):
    words = ["a b", "it's", "$(touch x)", "a\nb\n#SBATCH --hold", "c\r\n", '"']
    chain = submit("--chain", "2", "--only-ranks", "0", "printf", "<%s>", *words)
    record, said = chain.ended()
    assert "".join(f"<{word}>" for word in words) in said, record
