"""A small training: sums over all ranks by TCP, a checkpoint every 5 steps, metrics at each.

usage: steps.py FOLDER STEPS

In FOLDER: metrics/, checkpoint, acked (steps whose metrics were acknowledged), end (the last value,
bit for bit), plan.json (a list of what is to go wrong inside of ranks: kind, step and, where they
matter, rank, host and attempts).
"""

import json
import math
import os
import socket
import struct
import sys
import time
import traceback
from pathlib import Path

from ezpz_obs import History

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
HOST = os.environ.get("SLURMD_NODENAME", os.uname().nodename)
ATTEMPT = int(os.environ["EZPZ_ATTEMPT"])
PLAN = [
    each
    for each in json.loads((FOLDER / "plan.json").read_text())
    if each.get("rank", RANK) == RANK
    and each.get("host", HOST) == HOST
    and ATTEMPT in each.get("attempts", [ATTEMPT])
]


def say_whose(kind, value, trace):
    """As torch.distributed does it: each line of a traceback begins with its rank."""
    lines = "".join(traceback.format_exception(kind, value, trace)).splitlines()
    sys.stderr.write("".join(f"[rank{RANK}]: {line}\n" for line in lines))


sys.excepthook = say_whose
if any(each["kind"] == "import" for each in PLAN):
    import no_such_module  # noqa: F401


def connect():
    """Return rank 0's connections to the others, in their order; of another, that to rank 0."""
    port = int(os.environ["MASTER_PORT"])
    if RANK == 0:
        found = {}
        with socket.create_server(("", port)) as server:
            while len(found) < WORLD_SIZE - 1:
                connection = server.accept()[0]
                (rank,) = struct.unpack("<q", receive(connection))
                found[rank] = connection
        return [found[rank] for rank in sorted(found)]
    while True:
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], port), 5)
        except OSError:
            time.sleep(0.05)
        else:
            connection.settimeout(None)
            connection.sendall(struct.pack("<q", RANK))
            return [connection]


def receive(connection):
    data = b""
    while len(data) < 8:
        chunk = connection.recv(8 - len(data))
        if not chunk:
            raise ConnectionError("Connection closed by peer")
        data += chunk
    return data


def summed(value):
    """Return the sum over all ranks, in their order: the same bits on each."""
    if RANK == 0:
        for other in others:
            value += struct.unpack("<d", receive(other))[0]
        for other in others:
            other.sendall(struct.pack("<d", value))
        return value
    others[0].sendall(struct.pack("<d", value))
    return struct.unpack("<d", receive(others[0]))[0]


others = connect()
checkpoint, start, x = FOLDER / "checkpoint", 0, 0.5
if checkpoint.exists():
    saved = json.loads(checkpoint.read_text())
    start, x = saved["step"], float.fromhex(saved["x"])
history = History(FOLDER / "metrics") if RANK == 0 else None
for step in range(start, STEPS):
    for each in PLAN:
        if each["step"] == step and each["kind"] == "raise":
            raise ValueError(f"planned at step {step}")
        if each["step"] == step and each["kind"] == "disk":
            Path("/dev/full").write_bytes(b"x")
    x = math.cos(x + summed(math.sin(x * (RANK + 1) + step)))
    time.sleep(0.03)
    if history is not None:
        history.update({"x": x}, step=step)
        with (FOLDER / "acked").open("a") as file:
            file.write(f"{step}\n")
        if step % 5 == 4:
            draft = FOLDER / "checkpoint.draft"
            draft.write_text(json.dumps({"step": step + 1, "x": x.hex()}))
            draft.rename(checkpoint)
summed(0.0)
if RANK == 0:
    (FOLDER / "end").write_text(x.hex())
