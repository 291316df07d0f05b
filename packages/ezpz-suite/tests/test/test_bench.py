"""The command ``ezpz bench``: its runs on real ranks, the rows it keeps, and what it compares."""

import json
import re
import resource

import pytest

from ezpz._bench import UsageError, layouts_of, main

SPAWN = ("--launcher", "spawn", "-n", "2")
SMALL = ("--seq=16", "--batch=2", "--warmup=1", "--steps=4")


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_two_layouts_are_trained_kept_and_compared_with_the_last_time(ezpz, tmp_path):
    peak = "--env", "EZPZ_PEAK_FLOPS=1e12"
    done = ezpz("bench", *SPAWN, *peak, *SMALL, "--layouts=ddp,tp")
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "state" / "bench" / "rows.jsonl"
    ddp, tp = rows_of(kept)
    first, *lines, last = done.stdout.splitlines()
    fastest = max(ddp, tp, key=lambda row: row["tokens_per_s"])["layout"]
    assert first == f"debug: the fastest layout that fits is {fastest}"
    assert [line.split()[0] for line in lines] == ["ddp", "tp2"]
    assert "MFU" in lines[0]
    assert last == f"rows: {kept}"
    assert "ezpz bench: 2 of 2: tp2, debug, 2 ranks" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"state", "tmp"}
    for row in ddp, tp:
        # Every layout does the same work.
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 16 / row["step_ms"] * 1e3)
        assert row["step_ms_low"] <= row["step_ms"] <= row["step_ms_high"]
        assert row["tflops"] == pytest.approx(row["mfu"])
        assert (row["ranks"], row["nodes"], row["dtype"]) == (2, 1, "fp32")
        assert row["memory_peak_gib"] > 0

    # A machine that was a hundred times slower; and a size that there is not.
    slow = {name: 100 * ddp[name] for name in ("step_ms", "step_ms_low", "step_ms_high")}
    then = {**ddp, **slow, "tokens_per_s": ddp["tokens_per_s"] / 100}
    baseline = tmp_path / "tmp" / "then.jsonl"
    baseline.write_text(json.dumps(then) + "\n")
    words = "--layouts=ddp", "--sizes=debug,huge", f"--baseline={baseline}", "--json"
    done = ezpz("bench", *SPAWN, *SMALL, *words)
    assert done.returncode == 1, "there is no such size"
    found = json.loads(done.stdout)
    now, failed = found["rows"]
    assert found["fastest"] == {"debug": "ddp", "huge": None}
    assert failed["failed"].startswith("ModelError: no Llama of size 'huge'; expected one of debug")
    assert now["last"]["ratio"] == pytest.approx(now["tokens_per_s"] / ddp["tokens_per_s"])
    assert now["last"]["time"] == ddp["time"]
    assert now["baseline"]["verdict"] == "faster"
    assert [row["layout"] for row in rows_of(kept)] == ["ddp", "tp2", "ddp", "ddp"]


def test_a_layout_that_does_not_fit_is_a_line(ezpz, tmp_path):
    def less_memory():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))

    rows = tmp_path / "tmp" / "rows.jsonl"
    words = "--batch=2000000000", "--layouts=ddp", f"--out={rows}"
    done = ezpz("bench", *SPAWN, *words, preexec_fn=less_memory)
    assert done.returncode == 1
    first, line, _ = done.stdout.splitlines()
    assert first == "debug: none fits"
    assert "can't allocate memory" in line
    assert [row["out_of_memory"] for row in rows_of(rows)] == [True]


@pytest.mark.parametrize("layout", ["fsdp", "hsdp2", "tp2+fsdp"])
def test_four_ranks_train_in_each_layout(ranks, layout):
    words = [*SMALL, "--sizes=debug", f"--layouts={layout}"]
    done = ranks(4, f"from ezpz._bench import measure; sys.exit(measure({words!r}))")
    assert [one.status for one in done] == [0] * 4, done[0].err
    row = json.loads(done[0].out)
    assert (row["layout"], row["ranks"]) == (layout, 4)
    assert row["tokens_per_s"] == pytest.approx(4 * 2 * 16 / row["step_ms"] * 1e3)


@pytest.mark.parametrize(
    ("ranks", "ppn", "possible"),
    [
        (1, 1, "ddp"),
        (2, 2, "ddp fsdp tp2"),
        (3, 3, "ddp fsdp"),
        (8, 8, "ddp fsdp hsdp4 tp2 tp2+fsdp"),
        (24, 12, "ddp fsdp hsdp12 tp2 tp2+fsdp"),
    ],
)
def test_without_a_word_all_layouts_are_tried_that_the_ranks_allow(ranks, ppn, possible):
    assert layouts_of((), ranks, ppn) == possible.split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout=ddp"], "unknown option '--layout=ddp'; did you mean --layouts?"),
        (["--baseline=/nowhere"], "/nowhere: No such file or directory; expected a file of ezpz"),
        (["--out=/"], "/: Is a directory; expected a file of ezpz bench"),
    ],
)
def test_words_are_refused_before_anything_is_started(words, said, capfd):
    """As those of `ezpz test`, which are read by the same code."""
    assert main(words) == 2
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("ezpz bench: ")
    assert said in err


@pytest.mark.parametrize("layout", ["pp", "ddp2", "tp3", "hsdp", "tp2+fsdp"])
def test_a_layout_that_two_ranks_cannot_have_is_refused(layout):
    with pytest.raises(UsageError, match=rf"^--layouts={re.escape(layout)}.*; expected "):
        layouts_of([layout], 2, 2)
