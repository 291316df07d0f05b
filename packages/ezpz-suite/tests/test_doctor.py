"""The doctor: real entry points, real processes; checks that lie, crash, hang, or leave others."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from waiting import all_of, is_left, until

from ezpz import doctor as checks
from ezpz.doctor import DoctorError, find_checks, main, run_checks

OURS = {
    "accelerator", "all-reduce", "disk", "hostfile", "mpi", "network", "scheduler",
    "shared-memory", "wandb",
}  # fmt: skip

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="macOS has no such thing")

PROBES = """
import ctypes, os, re, signal, subprocess, sys, time
from ezpz_topo import CheckResult

def well(seconds):
    print("not an answer")
    return CheckResult.ok("it is well", seconds=seconds)
def exits(seconds):
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)
def hangs(seconds): time.sleep(3600)
def hangs_in_c(seconds): re.match("(a+)+$", "a" * 64 + "b")
def is_killed(seconds): os.kill(os.getpid(), signal.SIGKILL)
def lies(seconds): return {"status": "fine", "message": "", "colour": 3}
def raises(seconds): raise ZeroDivisionError("what broke\\nand more")
def says_much(seconds): return CheckResult.ok("x" * (3 << 20))
def segfaults(seconds): ctypes.string_at(0)
def stops(seconds): os.kill(os.getpid(), signal.SIGSTOP)
def warns(seconds):
    return {"status": "warning", "message": "a mapping does, too", "remedy": "nothing"}
def leaves_others(seconds):
    child = subprocess.Popen(["sleep", "3600"])
    copy = os.fork()  # with all that this process has open
    if copy == 0:
        time.sleep(3600)
    with open(os.environ["PROBE_PIDS"], "w") as file:
        file.write(f"{child.pid} {copy}")
    os._exit(0)
def hangs_with_another(seconds):
    other = subprocess.Popen(["sleep", "3600"])
    with open(os.environ["PROBE_PIDS"], "w") as file:
        file.write(f"{os.getpid()} {other.pid} ")
    time.sleep(3600)
"""
MAIN = "import sys; from ezpz.doctor import main; sys.exit(main())"


def install(site, *names, module=PROBES, more=""):
    """Make an installed distribution with checks: its metadata is what an installer writes."""
    info = site / "probes-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probes\nVersion: 1.2\n")
    entries = "".join(f"probe-{each} = probes:{each}\n" for each in names)
    (info / "entry_points.txt").write_text(f"[ezpz.checks]\n{entries}{more}")
    (site / "probes.py").write_text(module)
    return str(site)


@pytest.fixture
def probes(tmp_path):
    return lambda *names, **options: install(tmp_path / "site", *names, **options)


def process(*words, site="", **variables):
    """The words of the command, and the environment to start it in."""
    path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
    argv = [sys.executable, "-P", "-c", MAIN, *words]
    return {"args": argv, "env": {**os.environ, "PYTHONPATH": path, **variables}}


def doctor(*words, cwd=None, **options):
    """Return the exit status and the results, by the checks' names."""
    how = {"capture_output": True, "text": True, "timeout": 120, "cwd": cwd}
    done = subprocess.run(**process("--json", *words, **options), **how, check=False)
    found = json.loads(done.stdout)["checks"]
    return done.returncode, {each["name"].removeprefix("probe-"): each for each in found}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """One run of everything that a check can do to the doctor and end by itself."""
    folder = tmp_path_factory.mktemp("broken")
    names = ["well", "warns", "raises", "segfaults", "exits", "is_killed", "says_much", "lies",
             "leaves_others"]  # fmt: skip
    (folder / "broken_probes.py").write_text("import a_module_that_is_not_there\n")
    more = "probe-unimportable = broken_probes:check\n"
    site = install(folder / "site", *names, more=more)
    words = ",".join(f"probe-{each}" for each in [*names, "unimportable"])
    pids = folder / "pids"
    path = f"{site}{os.pathsep}{folder}"
    done = doctor(f"--only={words}", "--timeout=60", PROBE_PIDS=str(pids), site=path)
    return *done, [int(pid) for pid in pids.read_text().split()]


def test_a_package_of_somebody_else_contributes_checks(broken):
    status, results, _ = broken
    assert status == 1
    well = results["well"]
    assert (well["status"], well["message"]) == ("ok", "it is well")
    assert 40 < well["details"]["seconds"] < 60, "told how long it may take"
    assert well["source"] == "probes 1.2 (probes:well)"
    assert 0 < well["seconds"] < 60
    assert results["warns"]["status"] == "warning"
    assert results["warns"]["remedy"] == "nothing"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "probes:raises raised ZeroDivisionError: what broke$"),
        ("segfaults", r"crashed by SIGSEGV; it stands in segfaults \(.*probes.py:\d+\)"),
        ("exits", "ended with exit status 7 and without a result"),
        ("says_much", "answered more than 1 MiB"),
        ("lies", "probes:lies returned what is no result: TypeError: .*colour"),
        ("unimportable", "broken_probes:check cannot be loaded: ModuleNotFoundError: .*a_module"),
        ("leaves_others", "ended with exit status 0 and without a result"),
    ],
)
def test_a_broken_check_is_an_error_that_names_it(broken, name, message):
    _, results, _ = broken
    result = results[name]
    assert result["status"] == "error"
    assert re.search(message, result["message"])
    assert "probes 1.2" in result["source"]
    assert "install probes again" in result["remedy"]


def test_what_is_known_of_a_broken_check_is_told(broken):
    _, results, pids = broken
    killed = results["is_killed"]
    assert killed["status"] == "error"
    assert killed["message"] == "was killed by SIGKILL, and not by the doctor"
    assert "memory may be short" in killed["remedy"]
    assert "last words" in results["exits"]["details"]["printed"]
    assert "ZeroDivisionError: what broke\nand more" in results["raises"]["details"]["traceback"]
    assert len(pids) == 2
    assert not any(is_left(pid) for pid in pids), "nothing that a check started"


def test_checks_that_hang_are_errors_and_the_others_do_not_wait_for_them(probes):
    names = ["well", "hangs", "hangs_in_c", "stops"]
    only = ",".join(f"probe-{name}" for name in names)
    # Five seconds are promised, on an idle machine; a check hangs for an hour.
    begun = time.monotonic()
    status, results = doctor(f"--only={only}", site=probes(*names))
    assert time.monotonic() - begun < 60
    assert (status, results["well"]["status"]) == (1, "ok")
    for name in names[1:]:
        assert results[name]["status"] == "error"
        assert "hangs: did not end in 4 s" in results[name]["message"]
        assert f"--only=probe-{name}" in results[name]["remedy"]
    for name in ("hangs", "hangs_in_c"):
        assert re.search(rf"stands in {name} \(.*probes.py:\d+\)", results[name]["message"])


SLOW = """
import time
from ezpz_topo import CheckResult
time.sleep({seconds})
def well(seconds):
    return CheckResult.ok("it is well", seconds=seconds)
def hangs(seconds):
    time.sleep(3600)
well.prepare = lambda: time.sleep({seconds} / 2)
"""


def test_a_check_that_is_still_importing_gets_more_time(probes, monkeypatch):
    """As where torch lies on a file system that many use: nothing is found about the machine."""
    monkeypatch.syspath_prepend(probes("hangs", "well", module=SLOW.format(seconds=4)))
    seen = []
    hangs, well = run_checks(["probe-well", "probe-hangs"], timeout=3, watch=seen.append)
    assert seen[0] == ["probe-hangs", "probe-well"]
    assert (well.status, well.message) == ("ok", "it is well")
    assert 2 < well.details["seconds"] < 3, "all of its time is left"
    assert well.seconds > 6
    assert hangs.status == "error"
    assert hangs.message.startswith("hangs: did not end in 3 s; it stands in hangs (")


def test_imports_that_take_a_minute_are_an_error(probes, monkeypatch):
    monkeypatch.setattr(checks, "IMPORTS", 8.0)
    site = probes("well", module=SLOW.format(seconds=3600))
    monkeypatch.syspath_prepend(site)
    (result,) = run_checks(["probe-well"], timeout=1)
    assert result.status == "error"
    assert result.message == f"not imported in 8 s; it stands in <module> ({site}/probes.py:4)"
    assert "-X importtime -c 'import probes'" in result.remedy


def test_what_this_host_has_is_well(tmp_path):
    """The checks of our own packages; machines of tests have no scheduler, account or network."""
    status, results = doctor("--timeout=100", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is written to the working directory"
    assert set(results) >= OURS
    errors = {name: each["message"] for name, each in results.items() if each["status"] == "error"}
    assert (errors, status) == ({}, 0)
    assert results["all-reduce"]["details"]["bytes"] == 4 << 20
    assert results["all-reduce"]["details"]["gloo"]["milliseconds"] > 0
    assert results["hostfile"]["source"].startswith("ezpz-topo ")


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, -15),
        pytest.param(signal.SIGKILL, -9, marks=linux_only),
    ],
)
def test_however_it_ends_it_leaves_nothing(probes, tmp_path, number, status):
    site, pids = probes("hangs_with_another"), tmp_path / "pids"
    words = ("--only=probe-hangs_with_another", "--timeout=1000")
    started = subprocess.Popen(**process(*words, site=site, PROBE_PIDS=str(pids)))
    until(lambda: pids.exists() and pids.read_text().endswith(" "))
    started.send_signal(number)
    assert started.wait() == status
    left = [pid for pid in map(int, pids.read_text().split()) if is_left(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_without_any_check_it_is_an_error(monkeypatch):
    monkeypatch.setattr("ezpz.doctor.entry_points", lambda group: [])
    with pytest.raises(DoctorError, match="no installed package has an entry point of the group"):
        find_checks()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--jsn", "unknown word '--jsn'"),
        ("--only", "expected --only=VALUE"),
        ("--json=1", "expected --json;"),
        ("--only=disk --only=mpi", "--only is given twice; expected once"),
        ("--timeout=nan", "--timeout=nan; expected seconds above 0"),
        ("--only=wandbb", "did you mean wandb?"),
    ],
)  # fmt: skip
def test_words_that_make_no_sense(words, said, capsys):
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert (out, err.count("\n")) == ("", 1)


def test_every_check_is_listed(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"(?m)^{name} +ezpz-", listed) for name in OURS)


def on_a_terminal(*words, **options):
    """Run it on a terminal of 80 columns; return what it wrote there."""
    terminal, end = pty.openpty()
    command = process(*words, TERM="xterm", COLUMNS="80", **options)
    started = subprocess.Popen(**command, stdin=end, stdout=end, stderr=end)
    os.close(end)
    said = all_of(terminal)
    assert started.wait() == 0, "also with a warning"
    return said.decode()


LONG = """
from ezpz_topo import CheckResult
def well(seconds):
    return CheckResult.ok("words " * 30)
def warns(seconds):
    return CheckResult.warning("steers \\x1b[2J a terminal", "read " + "/a-long-path" * 12)
"""


def test_on_a_terminal_it_is_a_table_of_80_columns(probes):
    site = probes("well", "warns", module=LONG)
    said = on_a_terminal("--only=probe-well,probe-warns", "--timeout=60", site=site)
    assert "checking: probe-warns, probe-well" in said
    assert "\x1b[32mok" in said
    assert "\x1b[2J" not in said
    plain = re.sub(r"\x1b\[[0-9;]*[mK]", "", said.rpartition("\r\x1b[K")[2])
    lines = plain.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("warning  probe-warns  steers")
    assert lines[1].startswith(" " * 22 + "remedy: read")
    assert {line[:22].strip() for line in lines[1:-1]} == {"", "ok       probe-well"}
    assert lines[-1].startswith("2 checks in ")
    plain = on_a_terminal("--only=probe-well", "--timeout=60", site=site, NO_COLOR="1")
    assert "ok       probe-well" in plain
    assert "\x1b[3" not in plain
    assert "1 warning (probe-warns)" in lines[-1]
