"""Other ranks that are late, or gone, and names that no one thought of."""

import pytest

from ezpz_obs import History


def test_whatever_is_in_a_name(ranks):
    (one, other) = ranks(
        """
        import ezpz_obs
        history = ezpz_obs.History(cross_rank=True)
        history.update([{"a\\0b": 1.0, "\\udcff": 2.0}, {"a": 5.0, "b": 7.0, "\\udcff": 4.0}][RANK])
        say({name: value for name, value in history.last.items() if "mean" in name})
        """,
        2,
    )
    expected = {"a/mean": 5.0, "a\0b/mean": 1.0, "b/mean": 7.0, "\udcff/mean": 3.0}
    assert one.said == other.said == [expected], one.err
    assert "'a' only on rank 1" in one.err


def test_a_name_that_another_rank_has_for_a_statistic(ranks):
    done = ranks(
        """
        import ezpz_obs
        history = ezpz_obs.History(cross_rank=True)
        history.update([{"loss": 1.0}, {"loss/mean": 9.0}][RANK])
        say(history.last["loss/mean"])
        """,
        2,
    )
    assert [one.said for one in done] == [[1.0], [9.0]], "its own number is not overwritten"


@pytest.mark.parametrize("deferred", [False, True])
def test_no_number_of_ones_own_is_lost_where_another_rank_is(ranks, tmp_path, deferred):
    ranks(
        f"""
        import ezpz_obs, time
        out = {str(tmp_path / "run")!r}
        history = ezpz_obs.History(out, cross_rank=True, timeout=1, deferred={deferred})
        for step in range(5):
            if RANK == 1 and step == 2:
                time.sleep(60)
            try:
                history.update({{"a": float(step)}})
            except ezpz_obs.HistoryError:
                say(step)
        history.close()
        """,
        2, wait=[0],
    )  # fmt: skip
    assert [one["a"] for one in History.read(tmp_path / "run")] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_the_end_does_not_wait_for_a_rank_that_is_late(ranks, tmp_path):
    (one, _) = ranks(
        f"""
        import ezpz_obs, time
        history = ezpz_obs.History({str(tmp_path / "run")!r}, cross_rank=True, deferred=True)
        history.update({{"a": 1.0}})
        if RANK == 0:
            history.update({{"a": 2.0}})
            began = time.monotonic()
            history.close()
            say(time.monotonic() - began)
        else:
            time.sleep(60)
        """,
        2, wait=[0],
    )  # fmt: skip
    assert one.said[0] < 10
    assert "History at step 1: a rank did not come; " in one.err
    assert [one["a"] for one in History.read(tmp_path / "run")] == [1.0, 2.0]


def test_a_rank_that_fails_before_it_has_a_history_is_missed(ranks):
    (_, other) = ranks(
        """
        import ezpz_obs, time
        if RANK == 0:
            time.sleep(60)
        try:
            ezpz_obs.History(cross_rank=True, timeout=1)
        except ezpz_obs.HistoryError as error:
            say(str(error))
        """,
        2, wait=[1],
    )  # fmt: skip
    assert other.said[0].startswith("History begins: a rank did not come; ")
