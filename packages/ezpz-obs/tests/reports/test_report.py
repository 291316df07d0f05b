import html
import json
import re
import sys

import pytest

from ezpz_obs import HistoryError, ReportError, write_report


@pytest.fixture
def run(write_run, records):
    return write_run(*records(range(30), **{"loss": 1.0, "train/acc": 0.5, "a|b`c": 1.0}))


def test_what_is_written(run):
    page, text, *plots = write_report(run)
    assert (page, text) == (run / "report" / "report.html", run / "report" / "report.md")
    assert "curve-loss.svg" in {plot.name for plot in plots}
    assert sorted(path.name for path in (run / "report").iterdir()) == sorted(
        path.name for path in (page, text, *plots)
    )
    said = text.read_text()
    assert all((page.parent / name).is_file() for name in re.findall(r"\]\(([^)]*)\)", said))
    # Shown as they are: no column of the table is split by a metric's name.
    assert r"| a\|b\`c |" in said
    for line in said.splitlines():
        if line.startswith("| ") and "---" not in line:
            assert line.endswith(" |")
    svg = (page.parent / "curve-loss.svg").read_text()
    assert svg.startswith("<svg xmlns=")
    assert "prefers-color-scheme: dark" in svg


def test_no_credential_of_an_older_file_is_shown(write_run, records):
    event = {"event": "note", "time": 1.7e9, "message": "at https://me:hunter2@host/x"}
    folder = write_run(
        *records(range(5), loss=1.0), event, argv=["t.py", "--hf-token=hunter2", "--lr=1"],
        config={"api_key": "hunter2", "lr": 0.1},
    )  # fmt: skip
    page, text, *_ = write_report(folder)
    assert "hunter2" not in page.read_text() + text.read_text()
    assert "--hf-token=*** --lr=1" in page.read_text()


def test_markdown_has_no_html_of_others(write_run, records):
    folder = write_run(*records(range(5), **{"<img src=x>": 1.0}), run="<script>a</script>\n# b")
    said = write_report(folder)[1].read_text()
    assert "<img" not in said
    assert "<script" not in said
    assert html.unescape(said).startswith("# <script>a</script>")
    assert "\n# b" not in said


def test_a_report_is_replaced_and_other_files_left_alone(run):
    write_report(run)
    (run / "report" / "notes.txt").write_text("mine")
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 30, "time": 1.8e9, "new": 7.0}) + "\n")
    page = write_report(run)[0]
    assert "new" in page.read_text()
    assert (run / "report" / "notes.txt").read_text() == "mine"


def test_elsewhere_and_refused(run, tmp_path):
    page = write_report(str(run), tmp_path / "a" / "b")[0]
    assert page == tmp_path / "a" / "b" / "report.html"
    assert not (run / "report").exists()
    with pytest.raises(ReportError, match="no runs"):
        write_report([])
    with pytest.raises(HistoryError, match="no run at"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        write_report(run, tmp_path / "file")


def test_an_empty_run_has_a_report(write_run):
    page, text = write_report(write_run())
    assert "no records" in page.read_text()
    assert "no records" in text.read_text()


def test_many_metrics_are_for_the_table(write_run, records):
    page, _, *plots = write_report(
        write_run(*records(range(3), **{f"layer{n}/norm": 1.0 for n in range(300)}))
    )
    assert len(plots) <= 50
    said = page.read_text()
    assert "layer299/norm" in said
    assert "more metrics are not drawn" in said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_a_long_run_takes_little_time(tmp_path, python):
    names = [f"metric{n}" for n in range(10)]
    values = [
        ",".join(
            f'"{name}":{0.1234567 * (1 + (7 * n + place) % 97)!r}'
            for place, name in enumerate(names)
        )
        for n in range(997)
    ]
    for folder, steps in (("short", 30_000), ("long", 300_000)):
        (tmp_path / folder).mkdir()
        with open(tmp_path / folder / "metrics.jsonl", "w") as file:
            file.write('{"ezpz_obs":1,"attempt":0,"time":1.7e9,"run":"long","world_size":1}\n')
            file.writelines(
                f'{{"step":{step},"time":{1.7e9 + 0.25 * step!r},{values[step % 997]}}}\n'
                for step in range(steps)
            )
    # Not getrusage: its figure is the parent's where that was larger.
    done = python(
        """
        import re, time, orjson
        from ezpz_obs import write_report
        for folder in ("short", "long"):
            begun = time.process_time()
            write_report(folder)
            took = time.process_time() - begun
            print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])
        begun = time.process_time()
        for line in open("long/metrics.jsonl", "rb"): orjson.loads(line)
        print(took, time.process_time() - begun)
        """
    )
    short, long, seconds, reading = map(float, done.stdout.split())
    assert max(long, short) / 1024 <= 220, "all of its numbers are 29 MB"
    assert seconds <= 16 * reading, "the drawing, and a few times what orjson takes to read it"
