"""Real trainings on real ranks: every way to split and to wrap learns the same."""

import json
import os

import pytest

from .conftest import TEST

SMALL = ("--steps=6", "--layers=2", "--dim=64", "--seq=32", "--batch=4", "--sizes=none")


@pytest.fixture(scope="module")
def known():
    """The losses of one rank, and of two replicas, once they are known."""
    return {}


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (2, "--cp=2 --wrap=fsdp2"),
        (8, "--tp=2 --cp=2 --pp=2"),
    ],
)
def test_a_split_model_learns_what_one_rank_learns(tested, known, n, words):
    if "alone" not in known:
        one = tested(1, *SMALL)
        assert one["wrap"] == "none"
        assert one["losses"][-1] < 0.9 * one["losses"][0]
        known["alone"] = one["losses"]
    found = tested(n, *SMALL, *words.split())
    assert found["ok"]
    assert found["degrees"]["data"] == 1
    assert found["losses"] == pytest.approx(known["alone"], rel=1e-4)


def test_ranks_that_are_no_power_of_two_share_a_model_that_fits_them(tested):
    found = tested(3, "--steps=10", "--batch=2", "--seq=32", "--layers=1", "--tp=3")
    assert found["ok"]
    assert found["degrees"]["tensor"] == 3


@pytest.mark.parametrize(
    ("n", "words"),
    [
        (2, ""),
        (2, "--wrap=zero1"),
        (4, "--tp=2 --wrap=fsdp2"),
        (4, "--pp=2 --wrap=fsdp2"),
    ],
)
def test_however_it_is_wrapped_two_replicas_learn_the_same(tested, known, n, words):
    found = tested(n, *SMALL, *words.split())
    assert found["ok"]
    assert found["degrees"]["data"] == 2
    _, given, wrap = words.partition("--wrap=")
    assert found["wrap"] == (wrap if given else "ddp")
    assert found["losses"] == pytest.approx(known.setdefault("two", found["losses"]), rel=1e-4)


def test_the_whole_page(ranks, tmp_path):
    words = [*SMALL[:5], "--sizes=4K,64K", "--outdir=kept"]
    (first, page, said), (second, nothing, _) = ranks(2, TEST.format(words=words))
    assert (first, second, nothing) == (0, 0, "")
    assert "kept: loss" in page
    assert "Llama of 0.16 M parameters; ddp, data 2" in page
    assert "2 on 1 node: cpu, gloo" in page
    assert "tokens/s" in page
    assert "TFLOP/s a rank" in page
    assert page.rstrip().endswith("ok: the loss fell, all ranks agree, all values are finite")
    rows = [line.split() for line in page.splitlines() if " GB/s " in line]
    assert [row[:2] for row in rows] == [["4", "KiB"], ["64", "KiB"]]
    assert max(map(len, page.splitlines())) <= 80
    assert said.count("loss=") == 6, "progress is told"
    kept = tmp_path / "cwd" / "kept"
    assert sorted(path.name for path in kept.iterdir()) == ["metrics.jsonl", "result.json"]
    found = json.loads((kept / "result.json").read_bytes())
    lines = [json.loads(line) for line in (kept / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if "loss" in line] == found["losses"]
    assert found["tokens_per_step"] == 2 * 4 * 32
    (again, _, refused), (second, _, nothing) = ranks(2, TEST.format(words=words))
    assert (again, second) == (2, 2)
    assert "--outdir=kept has a run already; expected a new folder" in refused
    assert "kept" not in nothing
    assert found["tokens_per_s"] == pytest.approx(found["tokens_per_step"] / found["step_s"])


def test_every_pair_of_nodes(tested):
    found = tested(6, *SMALL[:5], "--sizes=4K", "--pairs", nodes=3)
    assert found["nodes"] == 3
    pairs = found["node_pairs"]["pairs"]
    assert [pair["nodes"] for pair in pairs] == [[0, 1], [0, 2], [1, 2]]
    assert all(pair["ranks"] == 4 and pair["is_right"] for pair in pairs), "both nodes' ranks"


SPOILED = """
import torch
from ezpz._test.rank import Trainer, run

def spoil(self, tokens, targets, of=Trainer.step):
    found = of(self, tokens, targets)
    {what}
    return found

Trainer.step = spoil
sys.exit(run({words!r}))
"""


def test_replicas_that_differ_are_a_failure_on_every_rank(ranks):
    drift = "with torch.no_grad(): self.model.module.norm.weight[0] += int(os.environ['RANK'])"
    done = ranks(2, SPOILED.format(what=drift, words=[*SMALL, "--json"]))
    assert [status for status, _, _ in done] == [1, 1]
    found = json.loads(done[0][1])
    assert not found["ok"]
    assert len(found["failures"]) == 1
    assert found["failures"][0].startswith(
        "ranks disagree: verify_replicated: data axis, ranks 0, 1"
    )
    assert "module.norm.weight should be the same on all of them" in found["failures"][0]
    assert "ezpz test: ranks disagree" in done[0][2]


def test_a_loss_that_is_no_number_ends_the_training(ranks):
    spoiled = "os.environ['RANK'] == '1' and len(targets) and found[0].mul_(float('nan'))"
    done = ranks(2, SPOILED.format(what=spoiled, words=[*SMALL, "--json"]))
    assert [status for status, _, _ in done] == [1, 1]
    found = json.loads(done[0][1])
    assert found["steps"] == 1
    assert found["failures"] == ["step 1: the loss is not finite on 1 of 2 ranks"]


def test_what_the_user_can_mend_is_one_line_of_one_rank(ranks):
    refused = {
        "--tp=3": "tensor 3 x context 1 x pipeline 1 = 3 does not divide the world size 2",
        "--dim=63": "make dim a multiple of 32",
        "--seq=3000000 --dim=32": "--seq=3000000; expected fewer than the 2",
        "--frob=1": "'--frob=1' is no option of a test; see ezpz test --help",
    }
    script = f"""
    from ezpz._test.rank import run
    for words in {list(refused)}:
        print(words, run(["--steps=4", "--batch=1", *words.split()]))
        ezpz_dist.cleanup()
    """
    done = ranks(2, script)
    assert [out.splitlines() for _, out, _ in done] == [[f"{words} 2" for words in refused]] * 2
    errors = [line for _, _, err in done for line in err.splitlines()]
    ours = [line for line in errors if line.startswith("ezpz test")]
    assert all(said in line for said, line in zip(refused.values(), ours, strict=True))
    assert not any("Traceback" in line for line in errors)


FULL = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
BROKEN = "ends = os.pipe(); os.close(ends[0]); os.dup2(ends[1], 1)"
CLOSED = "os.close(1); sys.stdout = None"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(FULL, []), (BROKEN, ["--json"]), (CLOSED, [])],
    ids=["full", "broken", "closed"],
)
def test_an_output_that_nobody_reads_loses_no_result(ranks, tmp_path, spoil, words):
    if spoil == FULL and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    complaint = "No space left on device" if spoil == FULL else ""
    test = TEST.format(words=["--steps=4", *SMALL[1:], "--outdir=kept", *words])
    ((status, _, said),) = ranks(1, f"{spoil}\n{test}")
    assert status == int(bool(complaint)), said
    assert "Traceback" not in said
    expected = [f"ezpz test: standard output: {complaint}"] if complaint else []
    assert [line for line in said.splitlines() if "standard output" in line] == expected
    assert json.loads((tmp_path / "cwd" / "kept" / "result.json").read_bytes())["steps"] == 4
