"""``--profile``: programs that run as Python itself would run them, and what ranks record."""

import gzip
import json
import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec

import pytest

from ezpz_launch import Request
from ezpz_launch._options import PROFILE
from ezpz_launch.rank_profile import summary

SHOW = """\
import sys
print(sys.argv, sys.path, sys.flags.optimize, __name__, __package__, globals().get("__file__"))
print(__spec__ and __spec__.name, type(__loader__).__name__, __builtins__)
"""
FILES = {
    "show.py": SHOW,
    "package/show.py": SHOW,
    "app/__main__.py": SHOW,
    "syntax.py": "x = (\n",
    "raises.py": "def f():\n    raise KeyError('é')\ntry:\n    f()\nfinally:\n    1 / 0\n",
    "interrupted.py": "raise KeyboardInterrupt",
    "hook.py": """\
import sys, traceback
sys.excepthook = lambda *error: print(traceback.format_exception(*error), error)
raise ValueError
""",
    "spawns.py": """\
from multiprocessing import get_context
def hello():
    print(__name__, __file__, flush=True)
if __name__ == '__main__':
    child = get_context('spawn').Process(target=hello)
    child.start()
    child.join()
    raise SystemExit(child.exitcode)
""",
}


@pytest.mark.parametrize("words", [
    "show.py a -m b", "-u -O package/link.py", "-W ignore -X utf8 show.py", "-P show.py",
    "-m package.show a", "-Omissing", "-um package.show -c", "-mpackage.show", "app a",
    "-I app.zip", "none.py", "-m none", "syntax.py", "raises.py", "-m raises", "spawns.py",
    "hook.py", "interrupted.py",
])  # fmt: skip
def test_a_program_is_run_as_python_itself_would(words, tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "package" / "link.py").symlink_to("../show.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
    same_as_python(words.split(), tmp_path)


@pytest.mark.parametrize("code", [
    "import sys; print(sys.argv, sys.path, __builtins__)", "exit(3)", "exit('said')",
    "import os; os.fork() or exit(4)",
])  # fmt: skip
def test_code_is_run_as_python_itself_would(code, tmp_path):
    same_as_python(["-c", code, "a", "b"], tmp_path)


@pytest.mark.parametrize("option", ["-u", "-I"])
def test_a_python_without_a_safe_path_runs_it(option, tmp_path):
    (tmp_path / "show.py").write_text("import sys; print(sys.argv, sys.path)")
    old = (  # as before 3.11
        "import runpy, sys, types; names = {*dir(sys.flags)} - {*dir(tuple), 'safe_path'}; "
        "flags = {name: getattr(sys.flags, name) for name in names if name[0] != '_'}; "
        "sys.flags = types.SimpleNamespace(**flags); "
        f"runpy.run_path({PROFILE!r}, run_name='__main__')"
    )
    runs = ["show.py", "a"], ["-c", old, "2:3", "profile", "show.py", "a"]
    direct, profiled = (
        subprocess.run([sys.executable, option, *words], cwd=tmp_path, capture_output=True,
                       check=False) for words in runs
    )  # fmt: skip
    assert profiled.stdout == direct.stdout, profiled.stderr


def same_as_python(words, folder):
    def run(command):
        done = subprocess.run(command, capture_output=True, cwd=folder, check=False)
        said = [re.sub(b"0x[0-9a-f]+", b"", stream) for stream in (done.stdout, done.stderr)]
        return done.returncode, *said

    command = (sys.executable, *words)
    assert run(Request(command, profile="2:3").rank_command) == run(command)
    assert not (folder / "ezpz-profile").exists()


def test_a_dry_run_shows_the_program_and_names_the_folder(launch):
    command = ["-m", "train", "--lr", "1"]

    def explained(*words):
        done = launch("--dry-run", "--json", "--profile", "10:15", *words, *command)
        said = json.loads(done.stdout)
        return said["settings"]["profile"], said["argv"][-8:]

    folder, argv = explained()
    assert folder == "steps 10:15, in ezpz-profile/LAUNCH"
    assert argv == [sys.executable, PROFILE, "10:15", "ezpz-profile", *command]
    folder, argv = explained("--stage", "--log-dir", "logs")
    assert argv[3:] == ["logs/profile", *command]
    assert argv[1] != PROFILE
    assert argv[1].endswith(PROFILE)  # the nodes' own


LAUNCHER = "int(os.environ['EZPZ_LAUNCH_ID'].split('-')[1])"


@pytest.mark.parametrize(("whom", "order"), [
    ("os.getpid()", ["retry 1", "no retry", "profile", "profile"]), (LAUNCHER, ["no retry"])
])  # fmt: skip
def test_a_signal_is_a_cause_and_nothing_is_told_before_all_is_over(spawned, tmp_path, whom, order):
    code = f"import os, time; os.kill({whom}, 15); time.sleep(60)"
    words = ("-n", "1", "--profile", "4:6", "--retries", "1")
    done = spawned(*words, "python", "-c", code, cwd=tmp_path)
    found = re.findall("(no retry|retry 1|profile)(?:: | of )(.*)", done.stderr)
    assert [what for what, _ in found] == order, done.stderr
    assert all("ended by a signal before step 6" in why for what, why in found if what == "profile")


def test_only_the_files_that_are_there_are_read(tmp_path):
    told = {"host": "a", "steps": 9, "recorded": 3, "ms": 2.0, "own": 2.0}
    for rank in (2, 10):
        (tmp_path / f"rank-{rank}.txt").write_text(json.dumps(told))
        (tmp_path / f"rank-{rank}.json.gz").touch()
    assert "steps 4 to 6, 2 of 1000000000 ranks: " in summary(str(tmp_path), "4:6", 10**9)


TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["EZPZ_ATTEMPT"])
steps, bad = map(int, sys.argv[1 + 2 * attempt :][:2])
model = DistributedDataParallel(torch.nn.Linear(64, 64))
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
for step in range(steps):
    time.sleep(0.3 * rank)  # rank 1 is the slow one, also on a busy machine
    model(torch.ones(8, 64)).sum().backward()
    if step == bad and rank == 1:
        raise ValueError("bad")
    for optimizer in optimizers:
        optimizer.step()
    schedule.step()
dist.destroy_process_group()
"""


@pytest.fixture
def trained(spawned, tmp_path):
    def run(*words, steps=(), script=TRAIN):
        (tmp_path / "train.py").write_text(script)
        # torch's profiler imports torch's compiler, which makes this folder, by default in TMPDIR.
        env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches")}
        command = ("python", "train.py", *steps)
        return spawned(*words, *command, cwd=tmp_path, env=env)

    return run


with_torch = pytest.mark.skipif(find_spec("torch") is None, reason="no torch here")


def marks(path):
    """Start and end of the marks of steps, the training's and the optimizer's, of a trace."""
    with gzip.open(path) as file:
        events = [each for each in json.load(file)["traceEvents"] if each.get("ph") == "X"]
    found = {"ProfilerStep": {}, "Optimizer.step": {}}
    for each in events:
        kind, _, name = each["name"].partition("#")
        if kind in found and each["cat"] == "user_annotation":
            found[kind].setdefault(name, []).append((each["ts"], each["ts"] + each["dur"]))
    return found["ProfilerStep"], found["Optimizer.step"]["SGD.step"]


@with_torch
def test_each_attempt_keeps_what_there_is_and_the_slowest_rank_is_named(trained, tmp_path):
    words = ("-n", "2", "--profile", "3:6", "--log-dir", "logs", "--retries", "1")
    done = trained(*words, steps=["9", "5", "8", "-1"])
    assert done.returncode == 0, done.stderr
    first, second = sorted((tmp_path / "logs" / "profile").iterdir())
    assert (first.name[-2:], second.name[-2:]) == (".0", ".1")
    assert f"(not to 6: the program ended after step 4): logs/profile/{first.name}/" in done.stderr
    assert set(marks(first / "rank-1.json.gz")[0]) >= {"3", "4"}
    assert "ValueError: bad" in (tmp_path / "logs" / "rank-1.err").read_text()
    names = [f"rank-{rank}.{end}" for rank in (0, 1) for end in ("json.gz", "txt")]
    assert sorted(path.name for path in second.iterdir()) == names
    for rank in (0, 1):
        steps, optimizers = marks(second / f"rank-{rank}.json.gz")
        assert sorted(steps) == ["3", "4", "5", "6"]
        # two of each step, within it
        spans = [span for name in steps for span in steps[name]]
        assert len(optimizers) == 8
        for start, end in optimizers:
            assert any(first <= start and end <= last for first, last in spans)
    said = done.stderr[done.stderr.rindex("ezpz-launch: profile of") :]
    where = f"logs/profile/{second.name}/rank-N.json.gz"
    assert said.startswith(f"ezpz-launch: profile of steps 3 to 6, 2 of 2 ranks: {where}\n")
    assert "https://ui.perfetto.dev" in said
    (each,) = re.findall(r"rank 0: a step took ([0-9.]+) ms", said)
    assert float(each) >= 300
    assert "slowest, outside of collectives: rank 1 on " in said
    assert " ms a step; fastest: rank 0, " in said
    assert re.search(r" 1\.0  aten::addmm$", said, re.MULTILINE)


OWN = """
import contextlib, os, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
for profiling in (contextlib.nullcontext(), torch.profiler.profile(), contextlib.nullcontext()):
    with profiling:
        for _ in range(5 if os.environ["EZPZ_ATTEMPT"] == "1" else 2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    if os.environ["EZPZ_ATTEMPT"] == "0":
        raise SystemExit(1)
    if hasattr(profiling, "events"):
        print(sum(each.name == "aten::addmm" for each in profiling.events()), "recorded")
"""


@with_torch
def test_nothing_is_recorded_of_few_steps_or_beside_a_profiler_of_the_programs_own(
    trained, tmp_path
):
    done = trained("-n", "1", "--profile", "4:12", "--retries", "1", script=OWN)
    assert (done.returncode, done.stdout) == (0, "5 recorded\n"), done.stderr
    line = "profile: nothing was recorded: the program ended after step 1; expected it to come to"
    assert f"ezpz-launch: {line} step 12; give --profile earlier steps\n" in done.stderr
    line = "the program uses torch's profiler itself at these steps\n"
    assert re.search(f"profile: nothing was recorded: rank 0 on .*: {line}", done.stderr)
    written = [path.name for path in (tmp_path / "ezpz-profile").glob("*/*")]
    assert written == ["rank-0.txt"] * 2
