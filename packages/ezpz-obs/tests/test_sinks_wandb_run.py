import json
import math
import os
import struct
import subprocess
import sys

import pytest

from ezpz_obs import History, replay

pytest.importorskip("wandb")

BLOCK, HEAD = 32768, 7


def logged(folder):
    """Return what was logged to the runs in a folder, as (run id, line), oldest run first.

    wandb 0.31 has no reader in Python any more: the framing is LevelDB's log, the messages
    are its own classes.
    """
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/*run-*/*.wandb")):
        for message in messages(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                line = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in items
                }
                found.append((path.stem, line))
    return found


def messages(data):
    assert data[:4] == b":W&B", data[:8]
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


@pytest.fixture(autouse=True)
def nobody(tmp_path_factory, monkeypatch):
    """A user without credentials."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "NETRC")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("EZPZ_SINK_SECONDS", "120")  # the machine may do ten other things


def train(folder, first=0, last=200, factor=1.0):
    with History(folder, sinks=["wandb"], summary=False, config={"lr": 0.1}) as history:
        for step in range(first, last):
            history.record(
                {
                    "train/loss": factor / (step + 1), "nan": math.nan, "inf": -math.inf,
                    "flag": step % 2 == 0, "big": 1 << 70, "<b>\"'": 2,
                },
                step=step,
            )  # fmt: skip


def test_offline_without_credentials_and_all_is_there(tmp_path, caplog):
    train(tmp_path)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    lines = [line for _, line in logged(tmp_path)]
    assert [line["step"] for line in lines] == list(range(200))
    assert [line["train/loss"] for line in lines] == [1 / (step + 1) for step in range(200)]
    records = History.read(tmp_path)
    assert [line["_timestamp"] for line in lines] == [record["time"] for record in records]
    assert math.isnan(lines[0]["nan"])
    assert lines[0]["inf"] == -math.inf
    assert [line["flag"] for line in lines[:2]] == [1, 0]
    assert lines[0]["big"] == 2.0**70
    assert lines[0]["<b>\"'"] == 2


def test_a_restarted_run_is_the_same_run_and_steps_may_go_back(tmp_path):
    train(tmp_path, last=20)
    train(tmp_path, first=15, last=25, factor=-1.0)
    found = logged(tmp_path)
    assert len({run for run, _ in found}) == 1
    assert [line["step"] for _, line in found] == [*range(20), *range(15, 25)]


def test_a_replay_is_a_run_of_its_own(tmp_path):
    train(tmp_path, last=20)
    assert replay(tmp_path, "wandb") == 20
    found = logged(tmp_path)
    first, second = dict.fromkeys(run for run, _ in found)
    assert [line["step"] for run, line in found if run == second] == list(range(20))
    assert first != second


def test_disabled_writes_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    train(tmp_path, last=5)
    assert not (tmp_path / "wandb").exists()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_run_of_setup_wandb_is_used_and_left_open(tmp_path):
    program = (
        "from ezpz_obs import History\n"
        "from ezpz_obs import setup_wandb\n"
        "run = setup_wandb('p', outdir='.')\n"
        "with History('run', sinks=['wandb'], summary=False) as history:\n"
        "    for step in range(30):\n"
        "        history.record({'loss': step})\n"
        "run.log({'after': 1})\n"
    )
    subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60, capture_output=True
    )
    lines = [line for _, line in logged(tmp_path)]
    assert [line["loss"] for line in lines[:-1]] == list(range(30))
    assert lines[-1]["after"] == 1
    assert not (tmp_path / "run" / "wandb").exists()
