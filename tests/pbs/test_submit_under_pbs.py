"""Jobs of `ezpz submit` on a real PBS: through its queue, its limits and its ends."""

import json
import shlex
import time
from pathlib import Path

import pytest
from chains import TWICE, Chain, goes_on, losses, words_arrive

ROOT = Path(__file__).resolve().parents[2]
SERVER = "pbs-0001"


@pytest.fixture
def submit(pbs, request):
    """Submit jobs of two nodes; what they leave is told by the record of their chain."""
    folder = f"{pbs.home}/{request.node.name.partition('[')[0]}-{time.monotonic_ns()}"

    def read(files):
        return pbs.on(SERVER, f"cat {files} 2>/dev/null ||:")

    class Submitted(Chain):
        def __init__(self, *words):
            super().__init__(read, f"{folder}/state")
            self.folder = folder
            self.said = self.ours("submit", "-N", "2", "--ppn", "1", *words)

        def ours(self, *words, **more):
            """Run a command of ours on the login node; return what it says, its status last."""
            begin = f". {pbs.home}/env/bin/activate; mkdir -p {folder}; cd {folder}; "
            begin += f"export EZPZ_STATE_DIR={folder}/state EZPZ_SCHEDULER_TIMEOUT=60; "
            text = f"{begin} ezpz-launch {shlex.join(words)} 2>&1; echo status $?"
            return pbs.on(SERVER, text, **more)

        @property
        def record(self):
            told = super().record
            pbs.jobs = [job["id"] for job in told["jobs"]]
            return told

    return Submitted


def test_a_training_goes_on_from_job_to_job_bit_for_bit(pbs, submit, ours_there):
    program = pbs.write("resumed.py", (ROOT / "tests" / "worlds" / "resumed.py").read_text())
    whole, parts = f"{pbs.home}/whole", f"{pbs.home}/parts"
    pbs.on(SERVER, f"mkdir {whole} {parts}")
    limits = ("--until-done", "--time", "0:01:30", "--signal-before", "40s")
    chain = submit(*limits, "python", program, parts)
    told = goes_on(chain, lambda: pbs.on(SERVER, f"cat {parts}/losses"))

    train = f"ezpz-launch --ppn 1 python {program} {whole} {len(told)}"
    pbs.ended(pbs.sub(train, "-l", "select=2:ncpus=2"), timeout=400)
    assert told == losses(pbs.on(SERVER, f"cat {whole}/losses"))[0]


def test_a_time_limit_without_a_checkpoint_is_seen_through(submit):
    body = f'echo "$EZPZ_ATTEMPT" >"$EZPZ_PROGRESS_FILE"; {TWICE}'
    chain = submit("--until-done", "3", "--time", "0:00:10", "sh", "-c", body)
    record, _ = chain.ends("done", 2)
    assert len(record["jobs"]) == 3, "the third was in the queue"


@pytest.mark.parametrize("words", [["--until-done", "5"], ["--chain", "3"]])
def test_a_deleted_job_ends_its_chain(pbs, submit, words):
    chain = submit(*words, "sh", "-c", 'echo "here $EZPZ_RANK"; sleep 600')
    pbs.on(SERVER, f"qdel {chain.writes('here 1')['jobs'][0]['id']}")
    chain.ends("killed", 1)


def test_a_chain_is_followed_to_its_end(submit):
    # Each rank has begun before one ends.
    here = '"$EZPZ_PROGRESS_FILE.$EZPZ_ATTEMPT'
    body = (
        'echo "part $EZPZ_ATTEMPT"; echo 1 >"$EZPZ_PROGRESS_FILE"; '
        f'touch {here}.$RANK"; until [ -e {here}.$((1 - RANK))" ]; do sleep 0.1; done; '
        "exit $((75 - 75 * EZPZ_ATTEMPT))"
    )
    chain = submit("--until-done", "3", "--name", "parts", "sh", "-c", body)
    first, second, *_ = chain.until(lambda record: len(record["jobs"]) > 1)[0]["jobs"]
    said = chain.ours("follow", "parts", timeout=300)
    assert [said.count(f"part {attempt}") for attempt in (0, 1)] == [2, 2], said
    assert f"job {first['id']} is over; the chain goes on with job {second['id']}" in said
    assert said.endswith("status 0\n")


def test_a_chain_is_killed_with_its_successor(pbs, submit):
    chain = submit("--until-done", "3", "--name", "long", "sh", "-c", "echo here; sleep 600")
    record = chain.writes("here")
    said = chain.ours("kill", "long", timeout=300)
    assert said.endswith("status 0\n"), said
    told = json.loads(chain.ours("jobs", "long", "--json").rpartition("}")[0] + "}")
    assert (told["state"], told["why"], told["chain"]["attempts"]) == ("cancelled", "ezpz kill", 1)
    for job in record["jobs"]:
        pbs.run("wait", job["id"])


def test_a_requeued_job_is_another_attempt(pbs, submit):
    chain = submit("--until-done", "3", "sh", "-c", TWICE)
    (first, *_) = chain.writes("here 0")["jobs"]
    pbs.run("on", SERVER, "sh", "-c", f". /etc/profile; qrerun {first['id']}")
    record, _ = chain.ends("done", 2)
    assert record["jobs"][0]["exit_status"] == 0


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("which", [0, 1])
def test_a_lost_node_is_seen_through(pbs, submit, which):
    chain = submit("--until-done", "3", "sh", "-c", TWICE)
    record, said = chain.until(lambda record: chain.output(record).count("here 0") == 2)
    (job, *_) = record["jobs"]
    told = json.loads(pbs.on(SERVER, f"qstat -f -F json {job['id']}"))["Jobs"][job["id"]]
    lost = [each.partition("/")[0] for each in told["exec_host"].split("+")][which]
    pbs.lose(lost)
    record, said = chain.ends("done", 2)
    assert lost not in [line.split()[2] for line in said.splitlines() if "here 1" in line]


REFUSES = """
import pbs
if str(pbs.event().job.Account_Name) == "closed":
    pbs.event().reject("account closed has no hours left")
"""


@pytest.fixture
def strict(pbs):
    """A queue that is not for alice, and an account that is refused."""
    is_closed = ("acl_user_enable=true", "acl_users=bob", "enabled=true", "started=true")
    begin = [f"set queue tight {each}" for each in is_closed]
    pbs.manage("create queue tight queue_type=execution", *begin)
    hook = "import hook accounts application/x-python default -"
    pbs.manage("create hook accounts event=queuejob", hook, stdin=REFUSES.encode())
    yield
    pbs.manage("delete queue tight", "delete hook accounts")


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(("words", "message"), [
    (["--queue", "none"], "was refused: qsub: Unknown queue; asked for nodes 2, queue none"),
    (["--queue", "tight"], "was refused: qsub: Unauthorized Request; asked for nodes 2, queue"),
    (["-A", "closed"], "was refused: qsub: account closed has no hours left; asked for nodes 2,"),
    (["--submit-args", "-l none=1"], "was refused: qsub: Unknown resource Resource_List.none"),
])  # fmt: skip
def test_what_pbs_refuses_is_said_in_its_words(submit, words, message):
    said = submit(*words, "true").said
    assert message in said
    assert "status 2" in said


def test_words_arrive_byte_for_byte(submit):
    words_arrive(submit)
