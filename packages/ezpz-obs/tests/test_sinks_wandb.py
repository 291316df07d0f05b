"""W&B: a run that starts within seconds or not at all, and the sink that logs to it."""

import json
import math
import os
import pty
import struct
import subprocess
import sys
import time

import pytest
from waiting import all_of

from ezpz_obs import History, replay, setup_wandb

from .test_sinks_libraries import HOSTILE, train

pytest.importorskip("wandb")

KEY = "a" * 40
PROMISED, BUSY = 10.0, 10.0
"""Seconds that start and end take at most, and what a busy machine adds."""
PROGRAM = """
import json, logging, sys, time
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
from ezpz_obs import setup_wandb, verify_wandb
from ezpz_obs._sinks import wandb as module
module.INIT_SECONDS = float(sys.argv[1])
import wandb  # seconds on a busy machine, and none of them a server's
began = time.time()
run = setup_wandb("tests", outdir="out", config={"lr": 0.1})
took = time.time() - began
if run is not None:
    run.log({"loss": 1.0})
print("FOUND" + json.dumps({
    "took": took, "offline": None if run is None else run.offline, "verify": verify_wandb(),
    "project": None if run is None else run.project,
}), flush=True)
"""


@pytest.fixture
def clean(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    # The machine may do ten other things.
    monkeypatch.setattr("ezpz_obs._sinks.CLOSE_SECONDS", 500.0)
    monkeypatch.setattr("ezpz_obs._sinks.wandb.INIT_SECONDS", 500.0)
    return home


@pytest.fixture
def start(tmp_path, clean):
    def start(seconds=500, **env):
        lines, printed = [], 0.0
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(seconds)], cwd=tmp_path, text=True,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            for line in process.stdout:
                lines.append(line)
                if line.startswith("FOUND"):
                    printed = time.monotonic()
            errors = process.stderr.read()
        took = time.monotonic() - printed
        assert process.returncode == 0, errors
        found = json.loads(next(line[5:] for line in lines if line.startswith("FOUND")))
        warned = [line for line in errors.splitlines() if line.startswith("WARNING W&B")]
        return {**found, "exit": took, "warned": warned, "errors": errors}

    return start


@pytest.mark.parametrize(
    "variables", [{"WANDB_MODE": "disabled"}, {"WANDB_DISABLED": "true"}, {"RANK": "1"}]
)
def test_nothing_is_started_where_it_is_disabled_and_on_other_ranks(
    clean, tmp_path, monkeypatch, variables
):
    ranks = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (variables | (ranks if "RANK" in variables else {})).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    assert setup_wandb("p") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


OFFLINE = "(credentials from WANDB_API_KEY); offline: send it later by `wandb sync`"


def never(path, name):
    return False


@pytest.mark.parametrize(
    "case",
    [
        (lambda path, name: name == "CreateRunFiles", 200, {}, False, ""),
        (lambda path, name: "file_stream" in path or name == "CreateRunFiles", 200, {}, False,
         None),
        (lambda path, name: True, 200, {"seconds": 7}, True, OFFLINE),
        (lambda path, name: name != "", 200, {"seconds": 7}, True, OFFLINE),
        (never, 200, {"seconds": 7, "WANDB_BASE_URL": "http://127.0.0.1:9"}, True, OFFLINE),
        (never, 401, {}, True, OFFLINE),
        # W&B's service has the id of the start that failed still in use.
        (never, 404, {"WANDB_RUN_ID": "mine"}, True, OFFLINE),
    ],
    ids=["answers", "hangs at the end", "never answers", "hangs after its first answer",
         "no listener", "refuses the key", "an id of one's own"],
)  # fmt: skip
def test_a_server(start, server, case):
    server.hangs_at, server.status, env, offline, said = case
    found = start(**{"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, **env})
    assert found["offline"] is offline
    assert found["verify"]
    assert found["took"] < env.get("seconds", math.inf) + BUSY
    assert found["exit"] < PROMISED + BUSY
    if said is not None:
        assert said in "".join(found["warned"])
        assert len(found["warned"]) == bool(said)


@pytest.mark.parametrize("key", ["", "abc"], ids=["no key", "no real key"])
def test_nobody_is_asked_on_a_terminal_and_the_run_is_offline(clean, server, tmp_path, key):
    server.hangs_at = never
    env = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": key}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "500"], stdin=theirs, stdout=theirs, stderr=theirs, env=env,
        cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = all_of(ours)
    assert process.wait(120) == 0
    assert b'"offline": true' in shown
    assert b"Enter your" not in shown
    if not key:
        assert b'"verify": false, "project": "tests"' in shown
        assert b"WARNING" not in shown
    assert list(tmp_path.glob("out/wandb/offline-run-*/*.wandb"))


BLOCK, HEAD = 32768, 7


def logged(folder):
    """Return what was logged to the runs in a folder, as (run id, line), oldest run first."""
    # wandb 0.31 has no reader in Python any more: the framing is LevelDB's log.
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/*run-*/*.wandb")):
        for message in messages(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            if record.WhichOneof("record_type") == "history":
                line = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                found.append((path.stem, line))
    return found


def messages(data):
    assert data[:4] in {b":W&B", b""}, data[:8]
    place, whole = HEAD, b""
    while place + HEAD <= len(data):
        if BLOCK - place % BLOCK < HEAD:  # the rest of a block is padding
            place += BLOCK - place % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + HEAD])
        if kind == 0:
            return
        whole += data[place + HEAD : place + HEAD + length]
        place += HEAD + length
        if kind in (1, 4):  # a whole message, or its last part
            yield whole
            whole = b""


@pytest.mark.usefixtures("clean")
def test_all_is_there_a_restarted_run_is_the_same_and_a_replay_another(
    tmp_path, warned, monkeypatch
):
    train(tmp_path, "wandb")
    records = History.read(tmp_path)
    train(tmp_path, "wandb", first=195, last=205, factor=-1.0)  # its steps go back
    # W&B's own process may write on after it has said that the run is finished.
    while len(found := logged(tmp_path)) < 210:
        time.sleep(0.05)
    (first,) = {run for run, _ in found}
    lines = [line for _, line in found]
    assert [line["step"] for line in lines] == [*range(200), *range(195, 205)]
    assert [line["loss"] for line in lines[:200]] == [1 / (step + 1) for step in range(200)]
    assert [line["_timestamp"] for line in lines[:200]] == [record["time"] for record in records]
    assert math.isnan(lines[0]["nan"])
    assert lines[0]["inf"] == -math.inf
    assert [line["train/flag"] for line in lines[:2]] == [1, 0]
    assert lines[0]["big"] == 2.0**70
    assert lines[0][HOSTILE] == 2
    assert replay(tmp_path, "wandb") == 205
    while len(found := logged(tmp_path)) < 415:
        time.sleep(0.05)
    # Folders are named by the second, so a fast replay's may come first.
    assert len({run for run, _ in found}) == 2
    assert [line["step"] for run, line in found if run != first] == list(range(205))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    train(tmp_path / "none", "wandb", last=5)
    assert not (tmp_path / "none" / "wandb").exists()
    assert not warned()


@pytest.mark.usefixtures("clean")
def test_the_run_of_setup_wandb_is_used_and_left_open(tmp_path, python):
    python(
        """
        from ezpz_obs import History, setup_wandb
        run = setup_wandb("p", outdir=".")
        with History("run") as history:  # the live run need not be named
            for step in range(30):
                history.record({"loss": step})
        run.log({"after": 1})
        """
    )
    lines = [line for _, line in logged(tmp_path)]
    assert [line["loss"] for line in lines[:-1]] == list(range(30))
    assert lines[-1]["after"] == 1
    assert not (tmp_path / "run" / "wandb").exists()


@pytest.mark.parametrize("kind", ["none", "mapping", "object"])
def test_settings_of_one_s_own_wait_no_longer(monkeypatch, kind):
    import wandb

    started = []
    monkeypatch.setattr(wandb, "init", lambda **options: started.append(options["settings"]))
    monkeypatch.setenv("WANDB_MODE", "offline")
    own = {"console": "wrap", "finish_timeout": 3.0}
    if kind == "none":
        setup_wandb("p")
        setup_wandb("p", settings=None)
    elif kind == "mapping":
        setup_wandb("p", settings=own)
    else:
        theirs = wandb.Settings(**own)
        setup_wandb("p", settings=theirs)
        assert theirs.model_fields_set == own.keys()
    for settings in started:
        assert settings.init_timeout == 7.0
        assert settings.finish_timeout == (7.0 if kind == "none" else 3.0)
        assert settings.console == ("off" if kind == "none" else "wrap")
