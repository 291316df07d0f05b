"""Statistics over real ranks, by gloo."""

import json
import textwrap

import numpy as np
import pytest

import ezpz_obs
from ezpz_obs import History, HistoryError

STATISTICS = ("mean", "std", "min", "max", "min_rank", "max_rank")
BEGIN = """
import math, os, time, ezpz_obs
from ezpz_obs import History, HistoryError
def last(metrics):
    history = History(cross_rank=True)
    history.update(metrics)
    return history.last
"""


@pytest.fixture
def ranks(ranks):
    return lambda code, size, **options: start(ranks, code, size, **options)


def start(ranks, code, size, **options):
    return ranks(BEGIN + textwrap.dedent(code), size, **options)


def test_every_statistic(ranks, tmp_path):
    out = tmp_path / "run"
    done = ranks(
        f"""
        with History({str(out)!r}, cross_rank=True) as history:
            history.update({{"y": 1e15 + RANK % 2}})
            say(history.last["y/std"])
            say(history.update({{"loss": 1e5 + 20 * RANK, "n": RANK == 2}}))
            say(history.update({{"n": 7, "loss": torch.tensor(float(RANK), requires_grad=True)}}))
            say(history.last)
        """,
        4,
    )
    assert [one.status for one in done] == [0] * 4, done[0].err
    assert len({json.dumps(one.said[:3]) for one in done}) == 1, "the line is of all ranks"
    assert done[1].said[0] == 0.5
    assert done[1].said[2] == "step=2 n=7 loss=1.5±1.1"
    _, first, second = History.read(out)
    values = np.array([1e5, 1e5 + 20, 1e5 + 40, 1e5 + 60])
    assert [first[f"loss/{name}"] for name in STATISTICS] == [
        values.mean(), pytest.approx(values.std(), rel=1e-14), 1e5, 1e5 + 60, 0, 3
    ]  # fmt: skip
    assert (first["n/mean"], first["n/max_rank"], first["n/min_rank"]) == (0.25, 2, 0)
    assert (second["loss"], second["loss/mean"], second["loss/max_rank"]) == (0.0, 1.5, 3)
    assert second["n/std"] == 0.0
    assert not list(out.glob("metrics-rank*")), "rank 0 writes"


def test_what_two_ranks_record(ranks):
    done = ranks(
        """
        found = last({"x": [1.0, math.nan][RANK], "y": [math.inf, 2.0][RANK], "z": 10 ** 400})
        say({name: str(value) for name, value in found.items()})
        found = last([{"a": 1.0, "b": 100.0}, {"b": 100.0, "a": 1.0}][RANK])
        say([found["a/mean"], found["b/mean"]])
        history = History(cross_rank=True)
        for count in (3, 40, 3, 500):
            history.update({f"m{i:03}": float(i + RANK) for i in range(count)})
            say([history.last["m002/mean"], history.last[f"m{count - 1:03}/mean"]])
        """,
        2,
    )
    for odd, order, *room in (one.said for one in done):
        assert (odd["x/mean"], odd["x/max_rank"]) == ("nan", "1"), "who has it is named"
        assert (odd["y/mean"], odd["y/max_rank"], odd["y/min"]) == ("inf", "0", "2.0")
        assert odd["z"] == "1" + "0" * 400
        assert odd["z/mean"] == "inf"
        assert order == [1.0, 100.0], "in another order they are not mixed"
        assert room == [[2.5, 2.5], [2.5, 39.5], [2.5, 2.5], [2.5, 499.5]]


def test_a_rank_that_is_not_finite_is_one_warning(ranks):
    here, there = ranks(
        """
        history = History(cross_rank=True)
        for _ in range(2):
            history.update({"x": [1.0, math.nan][RANK]})
        """,
        2,
    )
    assert here.err.splitlines() == ["x/mean is nan at step 0"]
    assert there.err.splitlines() == ["x is nan at step 0"]


def test_one_collective_an_update_or_one_in_every_n(ranks):
    code = """
        from torch.profiler import profile
        for options in ({}, {"cross_rank": 3}, {"deferred": True}):
            history = History(**{"cross_rank": True, **options})
            with profile() as trace:
                have = []
                for step in range(6):
                    history.update({f"m{i}": 1e5 + step + RANK for i in range(10)})
                    have.append("m9/mean" in history.last)
                history.flush()
            events = [event.name for event in trace.events() if event.name.startswith("gloo:")]
            say([have, events])
        """
    (one, _) = ranks(code, 2)
    assert [events for _, events in one.said] == [["gloo:all_gather"] * n for n in (6, 2, 6)]
    assert [have for have, _ in one.said[:2]] == [[True] * 6, [True, False, False] * 2]


def test_ranks_that_differ_are_named_once_and_never_mixed(ranks, tmp_path):
    done = ranks(
        f"""
        history = History({str(tmp_path / "run")!r}, cross_rank=True)
        for step in range(3):
            history.update({{"b": 1.0 + RANK, **[{{}}, {{"a": 10.0}}, {{}}][RANK]}})
        say(sorted(history.last))
        history.update({{"b": 1.0}})  # and together again
        say(history.last["b/mean"])
        history.close()
        history = History(cross_rank=True)
        for step in range(3):
            history.update({{"loss": 1.0}}, step=step + (RANK == 2))
            say(sorted(history.last))
        """,
        3,
    )
    assert [one.status for one in done] == [0, 0, 0], done[0].err
    last, together, *steps = done[0].said
    assert (last, together) == (["b", "step", "time"], 1.0)
    assert done[0].err.count("recorded metrics of other names than rank 0") == 1, done[0].err
    assert "rank 1 (" in done[0].err
    (warning,) = [e for e in ezpz_obs.read_run(tmp_path / "run").events if e["event"] == "warning"]
    assert "metrics of other names" in warning["message"]
    assert steps == [["loss", "step", "time"]] * 3
    assert done[0].err.count("recorded other steps than rank 0") == 1, done[0].err
    assert "rank 2 (" in done[0].err
    assert [one.err for one in done[1:]] == ["", ""], "rank 0 says it for all"


@pytest.mark.parametrize(
    ("how", "dist"),
    [("stays away", False), ("stays away", True), ("dies", True), ("rank 0 dies", False)],
)
def test_a_rank_that_stops_calling(ranks, how, dist):
    """Alone the others have torch's error; where ezpz_dist is set up it says who is missing."""
    if dist:
        pytest.importorskip("ezpz_dist")
    guilty = 0 if how.startswith("rank 0") else 2
    begin = "import ezpz_dist; ezpz_dist.setup_torch(timeout=3)" if dist else ""
    done = ranks(
        f"""
        {begin}
        history = History(cross_rank=True)
        for step in range(5):
            if step == 3 and RANK == {guilty}:
                if "dies" in {how!r}:
                    os.kill(os.getpid(), 9)
                time.sleep(60)
            try:
                history.update({{"loss": 1.0}})
            except HistoryError as error:
                say(str(error))
                say(history.last["step"])
                break
        """,
        3,
        set_up=not dist,
        env={"TIMEOUT": "3"},
        wait=[rank for rank in range(3) if rank != guilty],
    )
    who = f"rank {guilty} on " if dist else "a rank did not come"
    fate = "has ended" if "dies" in how else "program.py:"
    for rank in {0, 1, 2} - {guilty}:
        text, last = done[rank].said
        assert last == 3, "its own numbers are recorded"
        assert text.startswith("History at step 3: "), text
        assert who in text  # under load others may have left the collective by then, too
        assert not dist or fate in text
        assert "; expected every rank to call update() at every step" in text
        assert "torch says: " in text


def test_deferred_statistics_and_a_restart(ranks, tmp_path):
    with History(tmp_path / "again") as history:
        history.update({"loss": 1.0}, step=41)
    done = ranks(
        f"""
        again = History({str(tmp_path / "again")!r}, cross_rank=True, resume=True)
        say(again.update({{"loss": 1.0}}))
        with History({str(tmp_path / "run")!r}, cross_rank=True, deferred=True) as history:
            for step in range(4):
                say(history.update({{"loss": float(step + RANK)}}))
        """,
        2,
    )
    again, *said = done[0].said
    assert again == done[1].said[0] == "step=42 loss=1", "it goes on at one step on all ranks"
    assert said == ["", "step=0 loss=0.5±0.5", "step=1 loss=1.5±0.5", "step=2 loss=2.5±0.5"]
    records = History.read(tmp_path / "run")
    assert [(r["step"], r["loss"], r["loss/mean"]) for r in records] == [
        (step, float(step), step + 0.5) for step in range(4)
    ]


@pytest.mark.usefixtures("rank_1")
def test_without_torch_distributed():
    with pytest.raises(
        HistoryError, match=r"cross_rank=True on rank 1 of 2, and torch\.distributed"
    ):
        History(cross_rank=True)


def test_one_rank_has_the_same_names(tmp_path):
    with History(tmp_path, cross_rank=True) as history:
        assert history.update({"loss": 0.5}) == "step=0 loss=0.5"
    (record,) = History.read(tmp_path)
    assert {f"loss/{name}" for name in STATISTICS} <= record.keys()


def test_no_number_of_ones_own_is_lost_where_another_rank_is(ranks, tmp_path):
    ranks(
        f"""
        out = {str(tmp_path / "run")!r}
        history = History(out, cross_rank=True, deferred=True)
        for step in range(5):
            if RANK == 1 and step == 2:
                time.sleep(60)
            try:
                history.update({{"a": float(step)}})
            except HistoryError:
                say(step)
        history.close()
        """,
        2, wait=[0], env={"TIMEOUT": "8"},
    )  # fmt: skip
    assert [one["a"] for one in History.read(tmp_path / "run")] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_end_does_not_wait_for_a_rank_that_is_late(ranks, tmp_path):
    (one, _) = ranks(
        f"""
        history = History({str(tmp_path / "run")!r}, cross_rank=True, deferred=True)
        history.update({{"a": 1.0}})
        if RANK == 0:
            history.update({{"a": 2.0}})
            began = time.monotonic()
            history.close()
            say(time.monotonic() - began)
        else:
            time.sleep(15)
        """,
        2, wait=[0],
    )  # fmt: skip
    assert one.said[0] < 10
    assert "History at step 1: a rank did not come; " in one.err
    assert [one["a"] for one in History.read(tmp_path / "run")] == [1.0, 2.0]


def test_a_rank_that_fails_before_it_has_a_history_is_missed(ranks):
    (_, other) = ranks(
        """
        if RANK == 0:
            time.sleep(60)
        try:
            History(cross_rank=True)
        except HistoryError as error:
            say(str(error))
        """,
        2, wait=[1], env={"TIMEOUT": "2"},
    )  # fmt: skip
    assert other.said[0].startswith("History begins: a rank did not come; ")
