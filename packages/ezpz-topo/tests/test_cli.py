"""The command itself, as a process of its own."""

import fcntl
import io
import json
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from waiting import all_of

import ezpz_topo
from ezpz_topo._cli import main

COMMAND = str(Path(sys.executable).parent / "ezpz-topo")
CLEAN = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}


def run(*words, env=None, given=""):
    return subprocess.run(
        [COMMAND, *words], env={**CLEAN, **(env or {})}, input=given,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_table_of_every_value_and_its_source():
    done = run(env={"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1",
                    "MPI_LOCALNRANKS": "2", "RANK": "0"})  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line[:17].strip(): line[17:].split(None, 1) for line in done.stdout.splitlines()}
    assert rows["rank"] == ["1", "PMI_RANK"]
    assert rows["world size"] == ["2", "PMI_SIZE"]
    assert rows["nodes"] == ["1", "every rank is on this node"]
    assert (rows["machine"][0], rows["scheduler"][0]) == ("workstation", "none")
    assert "note: set aside: RANK=0 of the environment" in done.stdout


def test_on_a_terminal_the_last_column_stays_below_itself():
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 24, 70, 0, 0))
    with subprocess.Popen([COMMAND], env=CLEAN, stdin=its, stdout=its, stderr=its):
        os.close(its)
        lines = all_of(ours).decode().splitlines()
    start = next(line for line in lines if line.startswith("machine ")).index("no known machine")
    assert max(map(len, lines)) <= 70
    assert any(line[:start].isspace() and line[start:].strip() for line in lines)


def test_json_says_the_same():
    done = run("--json", env={"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nid[001-002]"})
    facts = json.loads(done.stdout)
    assert facts["nodes"] == {"value": 2, "source": "SLURM_JOB_NODELIST"}
    assert facts["hosts"]["value"] == "nid[001-002]"
    assert facts["ends_at"] == {"value": None, "source": "not told by slurm's variables"}
    assert facts["node"] == {"value": None, "source": "uname, and no SLURMD_NODENAME"}
    assert isinstance(facts["notes"], list)


@pytest.mark.parametrize(("words", "given", "env", "said"), [
    (["expand", "nid[008-010],login1"], "", {}, "nid008\nnid009\nnid010\nlogin1\n"),
    (["fold", "007", "008", "1e5"], "", {}, "[007-008],1e5\n"),
    (["fold"], "nid001\nnid002\n\nnid9\n", {}, "nid[001-002,9]\n"),
    # names that the terminal cannot show
    (["expand", "é"], "", {"PYTHONIOENCODING": "ascii"}, "\\xe9\n"),
    (["--version"], "", {}, f"{ezpz_topo.__version__}\n"),
])  # fmt: skip
def test_what_is_said(words, given, env, said):
    done = run(*words, given=given, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


@pytest.mark.parametrize(("env", "facts"), [
    ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nid[001-002]", "EZPZ_MACHINE": "frontier"},
     ["7", "slurm", "2", "8", "nid001", "nid002"]),
    ({"PBS_JOBID": "40[1].pbs", "PBS_NODEFILE": "a; b"}, ["40[1].pbs", "pbs", "1", "0", "x1"]),
    ({"TORCH_DEVICE": "cpu"}, ["none", "none", "1", "0", "localhost"]),
])  # fmt: skip
def test_shell_sets_variables_that_a_shell_evaluates(tmp_path, env, facts):
    (tmp_path / "a; b").write_text("x1\nx1\n")
    script = f'eval "$("{COMMAND}" --shell)"; printf "%s\\n" '
    names = ("JOB", "SCHEDULER", "NODES", "GPUS_PER_NODE", "HOSTS")
    script += " ".join(f'"$EZPZ_{name}"' for name in names)
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env={**CLEAN, **env},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == facts, done.stderr


def test_machines_lists_yours_too(tmp_path):
    (tmp_path / "utopia.toml").write_text('extends = "polaris"\n[match]\nhostnames = ["utopia#"]\n')
    done = run("machines", env={"EZPZ_MACHINES": str(tmp_path)})
    table, _, folder = done.stdout.partition("\n\n")
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert "4 cuda" in rows["utopia"]
    assert str(tmp_path) in rows["utopia"]
    assert os.path.exists(f"{folder.split()[-1]}/{rows['aurora'].split()[-1]}")
    assert {"aurora", "frontier", "workstation"} <= rows.keys()


@pytest.mark.parametrize(
    ("words", "what"),
    [(["expand", "nid[001-"], "is not closed"), (["expand", "n[1-100000000]"], "expected at most"),
     (["expand", "a", "b"], "expand NODELIST"), (["fold", "a,b"], "a,b"),
     (["--jsn"], "did you mean '--json'?"), (["machins"], "did you mean 'machines'?"),
     (["--shell", "--json"], "--shell alone"), (["expand", ""], "no host"), (["fold"], "no host"),
     ([], "half-set pmi environment")],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(capsys, monkeypatch, words, what):
    if not words:
        monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    status, said = main(words), capsys.readouterr()
    assert (status, said.out) == (2, "")
    (line,) = said.err.splitlines()
    assert line.startswith("ezpz-topo: ")
    assert what in line


def test_help_is_one_screen_with_examples():
    done = run("--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    lines = done.stdout.splitlines()
    assert len(lines) <= 32
    assert max(map(len, lines)) <= 100
    assert run("expand", "-h").stdout == done.stdout


def test_a_reader_that_goes_away_is_no_failure():
    words = [COMMAND, "expand", "n[1-500000]"]
    with subprocess.Popen(words, env=CLEAN, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout.readline() == b"n1\n"
        done.stdout.close()
        assert done.stderr.read() == b""
        assert done.wait() == 0


@pytest.mark.parametrize(
    ("words", "stream", "status"),
    [([], ">/dev/full", 1), (["fold"], "<&-", 2), ([], ">&-", 2)],
    ids=["a full disk", "closed input", "closed output"],
)
def test_streams_that_do_not_serve_are_one_line(words, stream, status):
    if "/dev/full" in stream and not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    shell = ["sh", "-c", f'"$@" {stream}', "sh", COMMAND, *words]
    done = subprocess.run(shell, env=CLEAN, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (status, 1)
    no_room = "ezpz-topo: standard output: No space left on device\n"
    assert (done.stderr == no_room) == (status == 1)
