"""Reads W&B's files: the framing is LevelDB's log, the messages are wandb's own classes."""

import json
import struct
from pathlib import Path

_BLOCK, _HEAD = 32768, 7


def history(folder: Path) -> list[dict]:
    """Return what was logged to the runs in a folder, oldest run first."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted(folder.glob("wandb/*run-*/*.wandb")):
        for message in _messages(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {
                        item.key or "/".join(item.nested_key): json.loads(item.value_json)
                        for item in record.history.item
                    }
                )
    return rows


def _messages(data: bytes):
    assert data[:4] == b":W&B", data[:8]
    place, whole = _HEAD, b""
    while place + _HEAD <= len(data):
        if _BLOCK - place % _BLOCK < _HEAD:  # the rest of a block is padding
            place += _BLOCK - place % _BLOCK
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + _HEAD])
        if kind == 0:
            return
        whole += data[place + _HEAD : place + _HEAD + length]
        place += _HEAD + length
        if kind in (1, 4):  # a whole message, or its last part
            yield whole
            whole = b""
