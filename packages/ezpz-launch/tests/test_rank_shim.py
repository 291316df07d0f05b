"""The shim, run by every sh that is here with the variables that real launchers set."""

import os
import re
import shutil
import socket
import subprocess

import pytest

from ezpz_launch._plan.shim import SHIM, pack_env
from ezpz_launch._run.launch import RankSettings

NAMES = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
ID = "shim-test.0"

SHELLS = {
    "dash": ["dash"],
    "bash": ["bash", "--posix"],
    "busybox": ["busybox", "sh"],
    "zsh": ["zsh", "--emulate", "sh"],
    "ksh": ["ksh"],
    "sh": ["sh"],
}


def find_shells():
    """Return the names of the shells that are here; sh may be one of the others."""
    found = {}
    for name, words in SHELLS.items():
        path = shutil.which(words[0])
        if path is not None:
            found.setdefault(os.path.realpath(path), name)
    return list(found.values())


@pytest.fixture(params=find_shells())
def shell(request):
    """The words that start a shell as sh."""
    return SHELLS[request.param]


@pytest.fixture
def words(shell):
    """The words that start a command as one rank."""

    def make(*command, form="--", nproc=4, ppn=4, names=NAMES, family="pmi"):
        return [*shell, SHIM, family, str(nproc), str(ppn), *names, form, *command]

    return make


def environment(env=None, hold=10, **control):
    told = {"EZPZ_CONTROL": RankSettings(ID, hold, **control).to_text()} if control else {}
    return {"PATH": os.environ["PATH"], **HYDRA, **told, **(env or {})}


@pytest.fixture
def shim(words):
    """Run a command as one rank, to its end; with fields of RankSettings, as under ezpz-launch."""

    def run(*command, env=None, control=None, options=None, **place):
        return subprocess.run(
            words(*command, **place), env=environment(env, **(control or {})),
            capture_output=True, check=False, **(options or {}),
        )  # fmt: skip

    return run


@pytest.fixture
def held(words, process):
    """Run a command that fails as one rank; return its shim, which waits, and its stderr so far."""

    def run(script, hold=10):
        env = environment(hold=hold, attempt=0)
        shim = process(*words("sh", "-c", script), env=env, stderr=-1)
        text = b""
        while text.count(b"\x1etest.0 e ") < 2 or not text.endswith(b"\n"):
            more = os.read(shim.stderr.fileno(), 1 << 16)
            assert more, text
            text += more
        return shim, text

    return run


@pytest.fixture
def variables(shim):
    """What the command finds in its environment."""

    def seen(env=None, control=None, **place):
        done = shim("env", "-0", env=env, control=control, **place)
        assert done.returncode == 0, done.stderr
        return dict(pair.decode().split("=", 1) for pair in done.stdout.split(b"\0") if pair)

    return seen


REPORT = re.compile(rb"\x1etest.0 (\w) (\d+) (\d+)\|\1 \2 \3\x1f\n")
WHAT = {"s": "start", "e": "end", "c": "cause", "t": "taken"}


def reports(stderr):
    """Return what was reported, each once, and what else was written."""
    found = [
        (WHAT[what.decode()], int(rank), int(value)) for what, rank, value in REPORT.findall(stderr)
    ]
    assert found[::2] == found[1::2]
    return found[::2], REPORT.sub(b"", stderr)


def test_torchruns_variables_and_the_stamp(variables):
    seen = variables()
    expected = {
        "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "0", "GROUP_RANK": "0", "EZPZ_NUM_NODES": "1", "EZPZ_LOCAL_RANK": "1",
        "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip
    assert seen.items() >= expected.items()
    assert (seen["EZPZ_RANK"], seen["EZPZ_WORLD_SIZE"], seen["EZPZ_LAUNCHER"]) == ("1", "4", "pmi")


def test_what_leaked_is_overridden(variables):
    leaked = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", "EZPZ_RANK": "9",
              "LOCAL_SIZE": "7", "PYTHONFAULTHANDLER": "0"}  # fmt: skip
    seen = variables(leaked)
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["EZPZ_RANK"]) == ("1", "4", "1")
    assert not {"TORCHELASTIC_RUN_ID", "LOCAL_SIZE"} & set(seen)
    assert seen["PYTHONFAULTHANDLER"] == "0"  # the user's own
    assert variables(leaked, family="torchrun")["TORCHELASTIC_RUN_ID"] == "x"


@pytest.mark.parametrize("form", ["--", "--escaped"])
@pytest.mark.parametrize("control", [None, {"prefix": False}], ids=["alone", "told"])
def test_words_are_untouched(shim, form, control):
    sent = [
        *("a b", "", "$(exit 3)", "it's", '"', "new\nline", "\n", "back\\slash", "*", ":", "+"),
        *("-n", "é", "", "--", "~", "!x", "a\tb ", ""),
    ]
    escape = "+" if form == "--escaped" else ""
    words = [f"{escape}{word}" for word in ("printf", "%s\\0", *sent)]
    out = shim(*words, form=form, control=control).stdout
    assert out.decode().split("\0")[:-1] == sent


def test_the_exit_status_and_a_signals_and_without_control_no_word(shim):
    ends = {f"exit {status}": status for status in (0, 1, 7, 75, 255)}
    kills = {f"ulimit -c 0; kill -{number} $$": number for number in (9, 11, 15)}
    for script, status in ends.items():
        done = shim("sh", "-c", script, env={"EZPZ_CONTROL": ""})
        assert (done.returncode, done.stdout, done.stderr) == (status, b"", b""), script
    for script, number in kills.items():
        done = shim("sh", "-c", script, env={"EZPZ_CONTROL": ""})
        assert (done.returncode, done.stdout, done.stderr) == (-number, b"", b""), script
        done = shim("sh", "-c", script, control={"hold": 0, "attempt": 0})
        assert (done.returncode, reports(done.stderr)[1]) == (128 + number, b""), script


def test_the_program_of_that_name_and_not_the_shells_own(shim):
    assert shim("echo", r"a\nb").stdout == b"a\\nb\n"
    assert shim("test", "-e", "/").returncode == 0
    done = shim("no-such-program")
    assert (done.returncode, b"no-such-program" in done.stderr) == (127, True)
    # which fails, and is held for no longer than this
    done = shim("sh", "-c", "exit 3", control={"hold": 1, "attempt": 0})
    assert (done.returncode, reports(done.stderr)[1]) == (3, b"")


def test_the_command_reads_nothing(shim):
    for control in (None, {"attempt": 0}, {"prefix": True}):
        assert shim("cat", control=control, options={"input": b"line\n"}).stdout == b""


@pytest.mark.parametrize("fds", ["3456789", "39"])
def test_the_launchers_file_descriptors_reach_the_command(words, fds):
    """Such as Hydra's PMI_FD; all that we may use for ourselves are in use here."""
    reads = f"for fd in {' '.join(fds)}; do head -c 1 <&$fd >/dev/null || exit 9; done"
    kept = " ".join(f"{fd}</dev/zero" for fd in fds)
    started = subprocess.run(
        ["bash", "-c", f'exec {kept}; exec "$@"', "_", *words("sh", "-c", reads)],
        env=environment(attempt=0), capture_output=True, check=False,
    )  # fmt: skip
    assert started.returncode == 0, started.stderr


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [("echo own >&2; exit 3", 3, b"own\n"), ("kill -9 $$", 137, b"")],
)
def test_a_rank_that_failed_waits_to_be_released(held, until, script, status, said):
    shim, text = held(script)
    (start, end), own = reports(text)
    assert start[:2] == ("start", 1)
    assert start[2] > 1
    assert (end, own) == (("end", 1, status), said)
    assert shim.poll() is None
    until(lambda: shim.terminate() or shim.poll() is not None)
    # zsh may report the end once more when it is interrupted
    assert (shim.wait(), reports(shim.stderr.read())[1]) == (status, b"")


@pytest.mark.parametrize(("word", "cause"), [("3", [("cause", 1, 3)]), ("x", [])])
def test_a_rank_that_leaves_because_of_another(shim, tmp_path, word, cause):
    script = f'echo {word} >"$EZPZ_CAUSE_FILE"'
    done = shim("sh", "-c", script, control={"attempt": 0}, env={"TMPDIR": str(tmp_path)})
    assert reports(done.stderr)[0][1:] == [*cause, ("end", 1, 0)]
    assert not list(tmp_path.iterdir())


def test_attempt_job_and_progress(variables):
    control = {"attempt": 2, "job_id": "12[3].pbs", "progress_file": "/a b/*"}
    seen = variables(control=control)
    assert (seen["EZPZ_ATTEMPT"], seen["TORCHELASTIC_RESTART_COUNT"]) == ("2", "2")
    assert (seen["EZPZ_JOB_ID"], seen["EZPZ_PROGRESS_FILE"]) == ("12[3].pbs", "/a b/*")
    assert seen["EZPZ_LAUNCH_ID"] == ID
    # our own stay ours
    assert not any(name.startswith(("ezpz_", "EZPZ_CONTROL")) for name in seen)
    leaked = {"EZPZ_JOB_ID": "1", "EZPZ_PROGRESS_FILE": "/x"}
    assert not set(leaked) & set(variables(leaked, control={"attempt": 0}))


NOT_OF_SH = {
    "BASH_FUNC_module%%": "() {  echo 'a  b'\n}", "my.dotted": "$HOME `id`", "A-B": "a\n\n",
    "1": "", "é": "é", "IFS": ":", "OPTIND": "7", "PPID": "1", "PS1": "> ", "PS4": "+ ",
    "SHELLOPTS": "errexit",
}  # fmt: skip
CONTROLS = {
    "alone": {}, "under ezpz-launch": {"attempt": 0}, "pumped": {"whole_lines": True},
    "files": {"log_dir": "{}/files"}, "both": {"log_dir": "{}/files", "tee": True},
}  # fmt: skip


@pytest.mark.parametrize("control", CONTROLS.values(), ids=CONTROLS)
def test_variables_that_sh_does_not_pass_on(shim, tmp_path, control):
    control = {field: str(value).format(tmp_path) for field, value in control.items()}
    # a path that env would take for a variable
    path = tmp_path / "lr=0.1" / "env"
    path.parent.mkdir()
    path.symlink_to(shutil.which("env"))
    done = shim(str(path), "-0", env={**NOT_OF_SH, **pack_env(NOT_OF_SH)}, control=control)
    found = done.stdout
    if "log_dir" in control:
        found = (tmp_path / "files" / "rank-1.out").read_bytes()
    seen = dict(pair.decode().split("=", 1) for pair in found.split(b"\0") if b"=" in pair)
    assert {each: seen.get(each) for each in NOT_OF_SH} == NOT_OF_SH, done.stderr
    assert not any(each.startswith(("ezpz_", "EZPZ_CONTROL")) for each in seen)


GPUS = {"device_type": "cuda", "devices": 4}
ONE = {**GPUS, "one_device": True}
XPUS = {**ONE, "device_type": "xpu"}
CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
ZE = "ZE_AFFINITY_MASK"


@pytest.mark.parametrize(("control", "local", "env", "seen"), [
    # no list: devices by number
    (GPUS, 1, {}, ("1", {})),
    (ONE, 1, {}, ("0", {CUDA: "1"})),
    (ONE, 5, {}, ("0", {CUDA: "1"})),
    # a list that the user made, to hide them
    (ONE, 1, {CUDA: ""}, ("1", {CUDA: ""})),
    # a list that the scheduler made
    (GPUS, 3, {CUDA: "2,3"}, ("1", {CUDA: "2,3"})),
    (ONE, 3, {CUDA: "2,3"}, ("0", {CUDA: "3"})),
    (ONE, 1, {CUDA: "GPU-1a,MIG-2b/3/4"}, ("0", {CUDA: "MIG-2b/3/4"})),
    # AMD
    (ONE, 1, {HIP: "2,3"}, ("0", {HIP: "3"})),
    (ONE, 3, {ROCR: "2,3"}, ("0", {ROCR: "2,3", CUDA: "1"})),
    # Intel
    (XPUS, 5, {}, ("0", {ZE: "1"})),
    (XPUS, 1, {ZE: "0.0,0.1", CUDA: "9"}, ("0", {ZE: "0.1", CUDA: "9"})),
    # none
    ({"attempt": 0}, 3, {CUDA: "2"}, ("3", {CUDA: "2"})),
])  # fmt: skip
def test_devices(variables, control, local, env, seen):
    place = {"PMI_RANK": str(local), "MPI_LOCALRANKID": str(local), "PMI_SIZE": "8"}
    found = variables({**env, **place}, control=control, nproc=8, ppn=8)
    lists = {name: found[name] for name in (CUDA, HIP, ROCR, ZE) if name in found}
    assert (found["LOCAL_RANK"], lists) == seen
    assert found["EZPZ_LOCAL_RANK"] == str(local)


SAYS = ("sh", "-c", "echo out; echo err >&2")


def test_files(shim, tmp_path):
    folder = tmp_path / "a b"
    folder.mkdir()
    for _ in range(2):  # an attempt's after the other's
        done = shim(*SAYS, control={"log_dir": str(folder)})
        assert (done.returncode, done.stdout, reports(done.stderr)[1]) == (0, b"", b"")
    assert (folder / "rank-1.out").read_bytes() == b"out\n" * 2
    assert (folder / "rank-1.err").read_bytes() == b"err\n" * 2
    # one that this node does not have
    done = shim(*SAYS, control={"hold": 0, "log_dir": str(tmp_path / "absent" / "logs")})
    made = (tmp_path / "absent" / "logs" / "rank-1.out").exists()
    assert made or b"absent" in done.stderr


@pytest.mark.parametrize("tee", [False, True])
def test_prefix_and_tee(shim, tmp_path, tee):
    control = {"prefix": True, **({"tee": True, "log_dir": str(tmp_path)} if tee else {})}
    done = shim(*SAYS, control=control, env={"SLURMD_NODENAME": "node-7"})
    assert done.stdout == b"[1@node-7] out\n"
    assert reports(done.stderr)[1] == b"[1@node-7] err\n"
    assert done.returncode == 0
    if tee:
        assert (tmp_path / "rank-1.out").read_bytes() == b"out\n"


def test_a_port_that_is_taken(shim):
    def said(port, rank=0):
        place = {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)}
        return reports(shim("true", env=place, control={"port": port}).stderr)[0]

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert ("taken", 0, port) in said(port)
        # only rank 0's host matters
        assert len(said(port, rank=1)) == 2
        with socket.create_connection(("127.0.0.1", port)) as connection:
            # nobody could listen there
            assert ("taken", 0, connection.getsockname()[1]) in said(connection.getsockname()[1])
    assert len(said(port)) == 2


@pytest.mark.parametrize(
    ("rank", "local", "node", "ranks_here"),
    [(3, 3, 0, 4), (4, 0, 1, 4), (9, 1, 2, 2)],
)
def test_several_hosts_the_last_one_smaller(variables, rank, local, node, ranks_here):
    env = {"PMI_RANK": str(rank), "PMI_SIZE": "10", "MPI_LOCALRANKID": str(local)}
    seen = variables(env, nproc=10)
    assert (seen["NODE_RANK"], seen["GROUP_RANK"]) == (str(node), str(node))
    assert (seen["LOCAL_WORLD_SIZE"], seen["EZPZ_NUM_NODES"]) == (str(ranks_here), "3")


def test_pals_with_pmix_tells_no_size_and_the_plan_does(shim):
    env = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1"}
    names = ("PALS_RANKID", "-", "PALS_LOCAL_RANKID")
    out = shim("sh", "-c", "echo $RANK $WORLD_SIZE $EZPZ_LAUNCHER", env=env, names=names,
               nproc=8, family="pals").stdout  # fmt: skip
    assert out == b"5 8 pals\n"


@pytest.mark.parametrize(
    ("env", "nproc"),
    [({"MPI_LOCALRANKID": "0"}, 4), ({}, 8), ({"PMI_RANK": "5"}, 4), ({"PMI_RANK": "abc"}, 4),
     ({"PMI_RANK": "-1"}, 4), ({"MPI_LOCALRANKID": ""}, 4)],
)  # fmt: skip
def test_a_launcher_that_places_ranks_elsewhere_than_planned(shim, env, nproc):
    done = shim("true", env=env, nproc=nproc)
    why = b"pmi set no MPI_LOCALRANKID" if "" in env.values() else b"contradicts the plan"
    assert (done.returncode, why in done.stderr) == (2, True)


def test_the_agent_is_started_once_a_node(shim, tmp_path):
    """By local rank 0 alone; it is told its node, and has nothing of ours open."""
    agent = tmp_path / "agent.py"
    agent.write_text(
        f"import os, sys\nos.rename('{tmp_path}/none', '{tmp_path}/agent-' + sys.argv[1])\n"
    )
    value = RankSettings(
        ID, 5, addresses=("127.0.0.1:1",), secret="a", programs=str(tmp_path)
    ).to_text()
    control = {"EZPZ_CONTROL": value, "PMI_SIZE": "8"}
    script = f"for i in $(seq 200); do [ -e {tmp_path}/agent-1 ] && exit 0; sleep 0.05; done"
    for rank, local in ((4, 0), (5, 1)):
        (tmp_path / "none").touch()
        place = {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(local)}
        done = shim("sh", "-c", script, env={**control, **place}, nproc=8)
        assert (done.returncode, done.stdout) == (0, b"")
        assert (tmp_path / "agent-1").exists()
        assert (tmp_path / "none").exists() is (local == 1)
