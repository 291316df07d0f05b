import os

import pytest

from ezpz_obs import __version__
from ezpz_obs._cli import main


@pytest.fixture
def run(write_run, records):
    return write_run(*records(range(30), **{"loss": 1.0, "1e3": 2.0, "[1]": 3.0}))


def test_help_is_one_screen(command):
    done = command("--help")
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) <= 40
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert command("report", "-h").stdout == done.stdout
    for name in ("report", "plot", "tail", "export", "replay"):
        assert f"ezpz-obs {name} " in done.stdout
    assert command("--version").stdout == f"{__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "expected one of report, plot"), (["nope"], "'nope'"), (["report"], "no RUN"),
        (["plot"], "run"), (["report", "RUN", "--out"], "--out=VALUE"),
        (["report", "RUN", "--out="], "is empty"), (["report", "RUN", "--open=1"], "--open=1"),
        (["report", "RUN", "-o"], "--out=VALUE"), (["report", "RUN", "--", "--trace"], "unknown"),
        (["tail", "RUN", "--lines=some"], "--lines=some"), (["tail", "RUN", "more"], "more"),
        (["export", "RUN"], "no file"),
        (["replay", "RUN"], "to"), (["tail", "RUN", "--no-follow=1"], "expected --no-follow"),
    ],
)  # fmt: skip
def test_words_that_make_no_sense(run, capsys, words, said):
    assert main([str(run) if word == "RUN" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert err.startswith("ezpz-obs: ")
    assert said in err


@pytest.mark.parametrize(
    "words",
    [["report", "nowhere"], ["plot", "RUN", "los"], ["export", "RUN", "--csv=none/x.csv"],
     ["replay", "RUN", "--to=nobody"]],
)  # fmt: skip
def test_what_cannot_be_done_is_said_in_a_line(run, capsys, words):
    assert main([str(run) if word == "RUN" else word for word in words]) == 1
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "expected" in err or "No such file" in err


def test_report(command, run, tmp_path):
    done = command("report", run, "--out=there")
    assert done.stdout.splitlines() == ["there/report.html", "there/report.md"]
    assert (tmp_path / "there" / "report.html").is_file()
    assert done.stderr == ""


def test_plot_takes_names_as_text(command, run):
    done = command("plot", run, "1e3", "[1]")
    assert "1e3: last 2" in done.stdout
    assert "[1]: last 3" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_tail_export_and_replay(command, run, tmp_path):
    done = command("tail", run, "--lines=2", "--no-follow")
    assert len(done.stdout.splitlines()) == 2
    done = command("export", run, "--csv=x.csv", "--parquet=x.parquet")
    assert done.stdout == "30 records in x.csv and x.parquet\n"
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 31
    done = command("replay", run, "--to=csv")
    assert (done.stdout, done.stderr) == ("30 records sent to csv\n", "")


@pytest.mark.parametrize(
    "words",
    [["report"], ["plot", "loss"], ["tail", "--no-follow", "--lines=1"], ["export", "--csv=x.csv"],
     ["export", "--parquet=x.parquet"], ["replay", "--to=csv"]],
)  # fmt: skip
@pytest.mark.parametrize("damage", ['{"step":7,"lo', "\0" * 100, "\xff", "[1]"])
def test_a_damaged_line_hides_no_run(command, run, words, damage):
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[8] = damage.encode("latin-1")
    path.write_bytes(b"\n".join(lines))
    done = command(words[0], run, *words[1:])
    assert done.stderr.count("1 damaged line is left out (line 9: ") == 1
    if words[0] == "report":
        for name in ("report.html", "report.md"):
            text = (run / "report" / name).read_text()
            assert "1 damaged line is left out" in text
            assert "29 records" in text
            assert "line 9 of metrics.jsonl" in text.replace("\\", "")
    elif words[0] in ("export", "replay"):
        assert done.stdout.startswith("29 records")
    else:
        assert done.stdout


def test_what_is_no_run_at_all(command, run):
    (run / "metrics.jsonl").write_text("hello\nworld\n")
    for words in (
        ["report"],
        ["plot"],
        ["tail"],
        ["export", "--csv=x.csv"],
        ["replay", "--to=csv"],
    ):
        done = command(words[0], run, *words[1:], status=1)
        assert "expected a line that a History wrote" in done.stderr


@pytest.mark.parametrize(("word", "package"), [("plot", "plotext"), ("report", "matplotlib")])
def test_a_missing_extra(run, command, word, package):
    done = command(word, run, before=f"sys.modules[{package!r}] = None", status=1)
    assert 'pip install "ezpz-obs[report]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_pipe_is_no_failure(run, command):
    reader, writer = os.pipe()
    os.close(reader)
    assert command("tail", run, "--lines=1000", "--no-follow", stdout=writer).stderr == ""
    os.close(writer)
