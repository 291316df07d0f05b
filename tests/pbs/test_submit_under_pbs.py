"""Jobs of `ezpz submit` on a real PBS: through its queue, its limits and its ends."""

import json
import shlex
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVER = "pbs-0001"


@pytest.fixture
def submit(pbs, request):
    """Submit jobs of two nodes; what they leave is told by the record of their chain."""
    folder = f"{pbs.home}/{request.node.name.partition('[')[0]}-{time.monotonic_ns()}"

    class Submitted:
        def __init__(self, *words):
            self.folder = folder
            self.said = self.ours("submit", "-N", "2", "--ppn", "1", *words)
            self.path = pbs.on(SERVER, f"echo {folder}/state/jobs/*.json").strip()

        def ours(self, *words, **more):
            """Run a command of ours on the login node; return what it says, its status last."""
            begin = f". {pbs.home}/env/bin/activate; mkdir -p {folder}; cd {folder}; "
            begin += f"export EZPZ_STATE_DIR={folder}/state EZPZ_SCHEDULER_TIMEOUT=60; "
            text = f"{begin} ezpz-launch {shlex.join(words)} 2>&1; echo status $?"
            return pbs.on(SERVER, text, **more)

        @property
        def record(self):
            told = json.loads(pbs.on(SERVER, f"cat {self.path}"))
            pbs.jobs = [job["id"] for job in told["jobs"]]
            return told

        def until(self, condition, seconds=400):
            """Wait until the record is as wanted; return it, and what its jobs wrote."""
            end = time.monotonic() + seconds
            while not condition(record := self.record):
                assert time.monotonic() < end, (record, self.output(record))
                time.sleep(0.5)
            return record, self.output(record)

        def output(self, record):
            files = [
                record["output"].replace("%j", job["id"].partition(".")[0])
                for job in record["jobs"]
            ]
            return pbs.on(SERVER, f"cat {' '.join(files)} 2>/dev/null ||:")

        def ended(self):
            return self.until(lambda record: record["outcome"])

    return Submitted


def losses(text):
    """Return the loss of each step, and the attempts that they are of."""
    lines = [line.split() for line in text.splitlines()]
    told = {int(step): loss for step, loss, _ in lines}
    assert sorted(told) == list(range(1, len(told) + 1))
    return told, {attempt for *_, attempt in lines}


def test_a_training_goes_on_from_job_to_job_bit_for_bit(pbs, submit, ours_there):
    program = pbs.write("resumed.py", (ROOT / "tests" / "worlds" / "resumed.py").read_text())
    whole, parts = f"{pbs.home}/whole", f"{pbs.home}/parts"
    pbs.on(SERVER, f"mkdir {whole} {parts}")
    limits = ("--until-done", "--time", "0:01:30", "--signal-before", "40s")
    chain = submit(*limits, "python", program, parts)
    record, said = chain.ended()
    assert record["outcome"] == "done", f"{record}\n{said}"
    assert 75 in [job["exit_status"] for job in record["jobs"]]
    told, attempts = losses(pbs.on(SERVER, f"cat {parts}/losses"))
    assert len(attempts) == 2
    assert record["best"] > 5

    train = f"ezpz-launch --ppn 1 python {program} {whole} {len(told)}"
    pbs.ended(pbs.sub(train, "-l", "select=2:ncpus=2"), timeout=400)
    assert told == losses(pbs.on(SERVER, f"cat {whole}/losses"))[0]


def test_a_time_limit_without_a_checkpoint_is_seen_through(submit):
    body = '[ "$EZPZ_ATTEMPT" = 1 ] && exit 0; echo 1 >"$EZPZ_PROGRESS_FILE"; sleep 600'
    record, said = submit("--until-done", "3", "--time", "0:00:10", "sh", "-c", body).ended()
    assert (record["outcome"], record["attempts"]) == ("done", 2), said
    assert len(record["jobs"]) == 3, "the third was in the queue"


@pytest.mark.parametrize("words", [["--until-done", "5"], ["--chain", "3"]])
def test_a_deleted_job_ends_its_chain(pbs, submit, words):
    chain = submit(*words, "sh", "-c", 'echo "here $EZPZ_RANK"; sleep 600')
    record, _ = chain.until(lambda record: "here 1" in chain.output(record))
    pbs.on(SERVER, f"qdel {record['jobs'][0]['id']}")
    record, said = chain.ended()
    assert record["outcome"] == "killed", (record, said)
    assert record["attempts"] == 1


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
    record, _ = chain.until(lambda record: "here" in chain.output(record))
    said = chain.ours("kill", "long", timeout=300)
    assert said.endswith("status 0\n"), said
    told = json.loads(chain.ours("jobs", "long", "--json").rpartition("}")[0] + "}")
    assert (told["state"], told["why"], told["chain"]["attempts"]) == ("cancelled", "ezpz kill", 1)
    for job in record["jobs"]:
        pbs.run("wait", job["id"])


def test_a_requeued_job_is_another_attempt(pbs, submit):
    body = 'echo "here $EZPZ_ATTEMPT"; [ "$EZPZ_ATTEMPT" = 1 ] || sleep 600'
    chain = submit("--until-done", "3", "sh", "-c", body)
    record, _ = chain.until(lambda record: "here 0" in chain.output(record))
    pbs.run("on", SERVER, "sh", "-c", f". /etc/profile; qrerun {record['jobs'][0]['id']}")
    record, said = chain.ended()
    assert (record["outcome"], record["attempts"]) == ("done", 2), (record, said)
    assert record["jobs"][0]["exit_status"] == 0


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("which", [0, 1])
def test_a_lost_node_is_seen_through(pbs, submit, which):
    body = 'echo "here $EZPZ_ATTEMPT $(hostname)"; [ "$EZPZ_ATTEMPT" = 1 ] || sleep 600'
    chain = submit("--until-done", "3", "sh", "-c", body)
    record, said = chain.until(lambda record: chain.output(record).count("here 0") == 2)
    (job, *_) = record["jobs"]
    told = json.loads(pbs.on(SERVER, f"qstat -f -F json {job['id']}"))["Jobs"][job["id"]]
    lost = [each.partition("/")[0] for each in told["exec_host"].split("+")][which]
    pbs.lose(lost)
    record, said = chain.ended()
    assert (record["outcome"], record["attempts"]) == ("done", 2), (record, said)
    assert lost not in [line.split()[2] for line in said.splitlines() if "here 1" in line]


REFUSES = """
import pbs
if str(pbs.event().job.Account_Name) == "closed":
    pbs.event().reject("account closed has no hours left")
"""


@pytest.fixture
def strict(pbs):
    """A queue with limits, which is not for alice, and an account that is refused."""
    limits = ("resources_max.walltime=1:00:00", "resources_max.nodect=2", "resources_min.nodect=2")
    is_closed = ("acl_user_enable=true", "acl_users=bob", "enabled=true", "started=true")
    begin = [f"set queue tight {each}" for each in (*limits, *is_closed)]
    pbs.manage("create queue tight queue_type=execution", *begin)
    hook = "import hook accounts application/x-python default -"
    pbs.manage("create hook accounts event=queuejob", hook, stdin=REFUSES.encode())
    yield
    pbs.manage("delete queue tight", "delete hook accounts")


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize(("words", "message"), [
    (["--queue", "none"], "--queue none: no such queue; expected one of workq"),
    (["--queue", "none"], "tight (2 to 2 nodes, up to 1:00:00)"),
    (["--queue", "tight", "--time", "2h"], "jobs of tight may run for 1:00:00; expected less"),
    (["--queue", "tight"], "was refused: qsub: Unauthorized Request; asked for nodes 2, queue"),
    (["-A", "closed"], "was refused: qsub: account closed has no hours left; asked for nodes 2,"),
    (["-A", "closed"], "account closed; expected what the site allows (queues: workq"),
    (["--submit-args", "-q tight"], "was refused: qsub: Unauthorized Request; asked for nodes 2;"),
    (["--submit-args", "-l none=1"], "was refused: qsub: Unknown resource Resource_List.none"),
    (["--submit-args", "-l select=9:ncpus"], "was refused: qsub: Illegal attribute or resource"),
])  # fmt: skip
def test_what_pbs_refuses_is_said_in_its_words(submit, words, message):
    said = submit(*words, "true").said
    assert message in said
    assert "status 2" in said


def test_words_arrive_byte_for_byte(submit):
    words = ["a b", "it's", "$(touch x)", "a\nb\n#PBS -h", "c\r\n", '"']
    chain = submit("--chain", "2", "--only-ranks", "0", "printf", "<%s>", *words)
    record, said = chain.ended()
    assert "".join(f"<{word}>" for word in words) in said, record


def test_an_array_is_one_job_of_many(pbs, submit):
    chain = submit("--array", "0-1", "sh", "-c", 'echo "task $PBS_ARRAY_INDEX"')
    (job,) = chain.record["jobs"]
    pbs.run("wait", job["id"], timeout=180)
    said = pbs.on(SERVER, f"cat {chain.folder}/*.o* ||:")
    assert [said.count(f"task {index}") for index in (0, 1)] == [2, 2], said
    told = json.loads(chain.ours("jobs", "--json").rpartition("]")[0] + "]")
    number = job["id"].partition("]")[0]
    assert [each["id"] for each in told if each["id"].startswith(number)] == [job["id"]]
    assert len(next(each for each in told if each["id"] == job["id"])["launches"]) == 2
