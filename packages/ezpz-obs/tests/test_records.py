"""The file: what is torn, damaged, old, of somebody else, or growing while it is read."""

import json

import numpy as np
import pytest

from ezpz_obs import History, HistoryError, read_run
from ezpz_obs._run import follow


@pytest.mark.parametrize(
    "torn", [b"{", b"\0" * 100, b'{"step":7,"lo', b'{"step":7,"' + b"x" * 2_000_000]
)
@pytest.mark.parametrize("before", [0, 1, 5000])
def test_a_run_goes_on_after_a_crash(tmp_path, before, torn):
    with History(tmp_path) as history:
        for step in range(before):
            history.update({"loss": 0.5}, step=step)
    with history.path.open("ab") as file:
        file.write(torn)
    assert len(History.read(tmp_path)) == before
    with History(tmp_path) as history:
        history.update({"loss": 0.25})
    assert [record["step"] for record in History.read(history.path)] == list(range(before + 1))


@pytest.mark.parametrize("text", ["hello\n", "hello", '{"loss":1}\n', '{"step":0}\nhello\n'])
def test_a_file_that_is_none_of_ours_is_not_continued(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(HistoryError, match="expected lines that a History wrote"):
        History(tmp_path)
    assert path.read_text() == text
    if text.endswith("\n"):
        with pytest.raises(HistoryError, match="expected a line that a History wrote"):
            _ = read_run(path).headers


def test_every_place_where_a_line_can_be_torn(tmp_path):
    with History(tmp_path) as history:
        history.update({"loss": 0.5, "name": float("nan")})
        history.update({"loss": 0.25})
    whole = history.path.read_bytes()
    last = whole.index(b'{"step":1')
    for end in range(last, len(whole)):
        history.path.write_bytes(whole[:end])
        assert [one["loss"] for one in History.read(tmp_path)][:1] == [0.5]
        with History(tmp_path) as again:
            again.update({"loss": 7.0})
        losses = [one["loss"] for one in History.read(tmp_path)]
        assert losses in ([0.5, 7.0], [0.5, 0.25, 7.0])


@pytest.mark.parametrize(
    ("line", "why"),
    [('{"step":1,"lo', "no JSON"), ('{"step":0,"time":1,"x":"high"}', "'high'; expected a number")]
    + [(line, "expected a line that a History wrote") for line in (
        '{"step":[1]}', '{"step":1}', '{"step":1.5,"time":1}', '{"step":1,"time":1,"x":[1]}')],
)  # fmt: skip
def test_a_damaged_line_is_an_error_that_names_it(tmp_path, line, why):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"ezpz_obs":1,"attempt":0,"time":1}}\n{line}\n{{"step":2,"time":2}}\n')
    with pytest.raises(HistoryError, match=rf"line 2 of .*metrics\.jsonl.*{why}"):
        History.read(path)
    with pytest.raises(HistoryError, match=rf"line 2 of .*metrics\.jsonl.*{why}"):
        _ = read_run(path).headers


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"step":0,"time":1}\n{"step":1,')
        file.truncate(1 << 36)  # zeros that take no room on the disk
    for look in (History.read, History, lambda path: list(follow(path, stop=lambda: True))):
        with pytest.raises(HistoryError, match="longer than 64 MiB"):
            look(path if look is not History else tmp_path)


def test_a_file_of_a_later_schema_and_none(tmp_path):
    with pytest.raises(HistoryError, match=r"no run at .*; expected a folder with metrics\.jsonl"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"ezpz_obs":2,"attempt":0}\n')
    with pytest.raises(HistoryError, match="schema 2; expected at most 1: read it with a newer"):
        _ = read_run(tmp_path).headers


def test_later_attempts_win(tmp_path):
    lines = []
    for attempt, steps in enumerate(([0, 1, 2, 3], [2, 3, 4], [1, 2])):
        lines.append({"ezpz_obs": 1, "attempt": attempt})
        lines += [{"step": step, "time": 0.0, "of": attempt} for step in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line, separators=(",", ":")) + "\n"
                                                    for line in lines))  # fmt: skip
    found = [(record["step"], record["of"]) for record in read_run(tmp_path).records()]
    assert found == [(0, 0), (1, 2), (2, 2)]


def test_blocks_are_the_records(tmp_path):
    with History(tmp_path) as history:
        for step in range(10):
            history.update({"a": step / 2, **({"b": float("nan")} if step in (4, 5) else {})})
    blocks = list(read_run(tmp_path).blocks(rows=3))
    assert [block.names for block in blocks] == [("a",), ("a",), ("a", "b"), ("a",), ("a",)]
    assert [block.values.shape for block in blocks] == [(3, 1), (1, 1), (2, 2), (3, 1), (1, 1)]
    assert np.concatenate([block.values[:, 0] for block in blocks]).tolist() == [
        step / 2 for step in range(10)
    ]
    assert np.isnan(blocks[2].values[:, 1]).all()
    assert blocks[2].steps.tolist() == [4, 5]
    assert (np.diff(np.concatenate([block.times for block in blocks])) >= 0).all()


def test_what_is_odd_among_many_records(tmp_path):
    with History(tmp_path) as history:
        for step in range(3000):
            history.update({"a": 10**400 if step == 1500 else step})
    assert [record["a"] for record in read_run(tmp_path).records()][1499:1502] == [
        1499, 10**400, 1501,
    ]  # fmt: skip
    values = np.concatenate([block.values[:, 0] for block in read_run(tmp_path).blocks()])
    assert np.isinf(values).nonzero()[0].tolist() == [1500]
    lines = history.path.read_bytes().splitlines(keepends=True)
    lines[2000] = lines[2000].replace(b":", b";", 1)
    history.path.write_bytes(b"".join(lines))
    with pytest.raises(HistoryError, match="line 2001"):
        History.read(tmp_path)
