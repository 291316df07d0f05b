"""The verdict, and what is printed of it."""

import io
import math

import pytest

import ezpz_obs
from ezpz._test.measure import Bandwidth, Pairs
from ezpz._test.result import Result, ends, has_fallen, write_page

PLACE = {
    "ranks": 8, "nodes": 4, "device": "cpu", "backend": "gloo", "wrap": "ddp",
    "parameters": 1_050_000, "degrees": {"tensor": 2, "pipeline": 1, "context": 1, "data": 4},
}  # fmt: skip


def result(losses=(5.0, 4.0, 3.0, 2.0), **changes):
    seconds = [1.0, *[0.1] * (len(losses) - 1)]
    told = {"tokens_per_step": 8192, "losses": list(losses), "seconds": seconds}
    return Result(**{**PLACE, **told, **changes})


def bandwidth(rate=1e9, size=1 << 20, is_right=True):
    return Bandwidth(size, 2, size / rate, 20, is_right=is_right)


def page(of, tmp_path, *, pairs_asked=False):
    with ezpz_obs.History(tmp_path / "test") as history:
        for loss in of.losses:
            history.record({"loss": loss})
    out = io.StringIO()
    write_page(of, tmp_path / "test", out, pairs_asked=pairs_asked)
    return out.getvalue()


def test_a_loss_has_fallen_by_its_quarters():
    assert ends([4.0] * 4 + [1.0] * 4) == (4.0, 1.0)
    assert has_fallen([4.0, 3.0, 3.0, 3.9])
    assert not any(map(has_fallen, ([4.0, 3.0, 3.0, 4.0], [4.0, 3.0, 3.0, math.nan], [], [1.0])))
    assert (result().failures(), result().facts()["ok"]) == ([], True)
    assert result().facts()["step_s"] == 0.1, "the first steps set things up"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"losses": [2.0, 3.0, 4.0, 5.0]}, "the loss did not fall: mean 2.0000 of the first"),
        ({"not_finite": "the loss is not finite on 1 of 8 ranks"}, "step 4: the loss is not"),
        ({"disagreement": "data axis: w differs"}, "ranks disagree: data axis: w differs"),
        ({"bandwidths": [bandwidth(is_right=False)]}, "wrong sums for messages of [1048576] byt"),
        ({"pairs": Pairs(("a", "b"), {(0, 1): bandwidth(is_right=False)})}, "all-reduce gave wr"),
    ],
)
def test_what_is_wrong_is_said(changes, said, tmp_path):
    of = result(**changes)
    (failure,) = of.failures()
    assert said in failure
    assert of.facts()["failures"] == [failure]
    assert not of.facts()["ok"]
    assert page(of, tmp_path).splitlines()[-1] == f"FAILED: {failure}"


def test_the_pairs_are_listed_slowest_first(tmp_path):
    pairs = {(0, 1): bandwidth(4e9), (0, 2): bandwidth(1e9), (1, 2): bandwidth(2e9)}
    text = page(result(pairs=Pairs(("a", "b", "c"), pairs)), tmp_path)
    rows = [line.partition("of the median  ")[2] for line in text.splitlines()]
    assert [row for row in rows if row] == [
        "a (node 0) and c (node 2)", "b (node 1) and c (node 2)", "a (node 0) and b (node 1)",
    ]  # fmt: skip
    assert "slowest pair: a and c\n" in text
    assert "slowest node: c, 1.500 GB/s in the median of its pairs; all pairs 2.000 GB/s" in text
    # Of many pairs the slowest are listed.
    pairs = {(0, node): bandwidth(node * 1e9) for node in range(1, 16)}
    text = page(result(pairs=Pairs(tuple("abcdefghijklmnop"), pairs)), tmp_path / "many")
    assert text.count("of the median") == 10
    assert "and 5 more; --json has all of them" in text


def test_one_rank_and_one_node_are_no_failure(tmp_path):
    of = result(ranks=1, nodes=1)
    text = page(of, tmp_path, pairs_asked=True)
    assert "one rank: there is no peer to send to" in text
    assert "one node: there is no pair" in text
    assert text.endswith("ok: the loss fell, all ranks agree, all values are finite\n")


def test_without_plotext_the_numbers_are_there(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "plotext", None)
    text = page(result(rates={"tokens_per_s": 81920.0, "tflops": 0.5, "mfu": 0.25}), tmp_path)
    assert "no loss curve: a plot needs plotext" in text
    assert "81,920 tokens/s, 0.5 TFLOP/s a rank, MFU 25.0%" in text
