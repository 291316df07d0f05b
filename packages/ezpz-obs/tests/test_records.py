"""The file: what is torn, damaged, old, of somebody else, or growing while it is read."""

import json

import numpy as np
import pytest

from ezpz_obs import History, HistoryError, read_run
from ezpz_obs._run import iterate_new_lines


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


DAMAGED = [
    (b'{"step":1,"lo', "no JSON"), (b'{"step":1,"time":1,"\xff\xfe":1}', "no JSON"),
    *((line, "expected a line") for line in (
        b"\0" * 100, b"\0" * 5_000_000, b"\xff", b"", b"null", b"[1]", b"7")),
    (b'{"step":1,"time":1,"x":"high"}', "'high'; expected a number"),
    (b'{"loss":1}', "expected a line that a History wrote"),
    (b'{"ezpz_obs":1,"attempt":0,"ti', "no JSON"), (b'{"event":"warning","mess', "no JSON"),
    *((line, "expected an integer step, a time and numbers") for line in (
        b'{"step":[1]}', b'{"step":1}', b'{"step":1.5,"time":1}', b'{"step":1,"time":1,"x":[1]}')),
]  # fmt: skip


@pytest.fixture
def write_lines(tmp_path):
    """Write a run of three records, with a line before the one of this number; number it so."""

    def write(line, number=3):
        lines = [b'{"ezpz_obs":1,"attempt":0,"time":1.0,"run":"r"}']
        lines += [b'{"step":%d,"time":%d.0,"loss":%d.5}' % (n, n, n) for n in range(3)]
        lines += [b'{"event":"end","time":9.0,"step":2,"message":"closed"}']
        lines.insert(number - 1, line)
        (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        return tmp_path

    return write


@pytest.mark.parametrize(("line", "why"), DAMAGED)
@pytest.mark.parametrize("number", [1, 3, 6])
def test_a_damaged_line_is_left_out_and_counted(write_lines, warned, line, why, number):
    run = read_run(write_lines(line, number))
    assert [record["loss"] for record in run.records()] == [0.5, 1.5, 2.5]
    assert [header["run"] for header in run.headers] == ["r"]
    assert [event["message"] for event in run.events] == ["closed"]
    assert list(run.damaged) == [number]
    assert why in run.damaged[number]
    (said,) = warned()
    assert "metrics.jsonl: 1 damaged line is left out" in said
    assert f"line {number}: " in said
    list(run.records())
    assert len(warned()) == 1, "the same is not said twice"


@pytest.mark.parametrize(("line", "why"), DAMAGED)
def test_a_run_with_a_damaged_line_goes_on(write_lines, warned, line, why):
    folder = write_lines(line)
    before = (folder / "metrics.jsonl").read_bytes()
    with History(folder, resume=True) as history:
        history.update({"loss": 3.5})
    assert history.path.read_bytes().startswith(before)
    run = read_run(folder)
    assert [(record["step"], record["loss"]) for record in run.records()] == [
        (0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5),
    ]  # fmt: skip
    assert why in run.damaged[3]
    assert warned()


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"step":0,"time":1}\n{"step":1,')
        file.truncate(1 << 36)  # zeros that take no room on the disk

    def follow(path):
        return list(iterate_new_lines(read_run(path), stop=lambda: True))

    for look in (History.read, History, follow):
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
    run = read_run(tmp_path)
    assert [record["step"] for record in run.records()] == [*range(1999), *range(2000, 3000)]
    assert list(run.damaged) == [2001]
