"""Chains of jobs that `ezpz submit` made on a real scheduler, told by the record that is kept."""

import json
import time

TWICE = 'echo "here $EZPZ_ATTEMPT $(hostname)"; [ "$EZPZ_ATTEMPT" = 1 ] || sleep 600'
"""What a rank does whose first job has to go."""

ODD = ["a b", "it's", "$(touch x)", "a\nb\n#SBATCH --hold\n#PBS -h", "c\r\n", '"']


class Chain:
    """What a chain's jobs leave; ``read`` prints the files of a pattern, where it was submitted."""

    def __init__(self, read, state):
        self._read, self._state = read, state

    @property
    def record(self):
        return json.loads(self._read(f"{self._state}/jobs/*.json"))

    def until(self, condition, seconds=400):
        """Wait until the record is as wanted; return it, and what its jobs wrote."""
        end = time.monotonic() + seconds
        while not condition(record := self.record):
            assert time.monotonic() < end, (record, self.output(record))
            time.sleep(0.3)
        return record, self.output(record)

    def writes(self, words):
        """Wait until its jobs have written these words; return its record."""
        return self.until(lambda record: words in self.output(record))[0]

    def output(self, record):
        numbers = [job["id"].partition(".")[0] for job in record["jobs"]]
        return self._read(" ".join(record["output"].replace("%j", each) for each in numbers))

    def ends(self, outcome, attempts):
        """Wait for its outcome, which has to be this; return its record, and what was written."""
        record, said = self.until(lambda record: record["outcome"])
        assert (record["outcome"], record["attempts"]) == (outcome, attempts), (record, said)
        return record, said


def losses(text):
    """Return the loss of each step, and the attempts that they are of."""
    lines = [line.split() for line in text.splitlines()]
    told = {int(step): loss for step, loss, _ in lines}
    assert sorted(told) == list(range(1, len(told) + 1)), text
    return told, {attempt for *_, attempt in lines}


def goes_on(chain, read):
    """Assert that a training went on from job to job; return its losses, as ``read`` has them."""
    record, said = chain.ends("done", 2)
    assert 75 in [job["exit_status"] for job in record["jobs"]], (record, said)
    told, attempts = losses(read())
    assert (len(attempts), record["best"] > 5) == (2, True), (record, said)
    return told


def words_arrive(submit):
    script = '[ "$RANK" != 0 ] || printf "<%s>" "$@"'
    chain = submit("--chain", "2", "sh", "-c", script, "sh", *ODD)
    record, said = chain.ends("done", 1)
    assert "".join(f"<{word}>" for word in ODD) in said, record
