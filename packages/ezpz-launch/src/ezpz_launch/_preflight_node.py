"""Program: what `ezpz preflight` looks at on one node; it prints one line of JSON.

usage: _preflight_node.py   as a rank of ezpz-launch, one a node; needs the standard library only

Node 0 is where all meet: it compares clocks, and tells each where the others listen. Then nodes
exchange data in pairs, log2(n) times. What is wrong is judged by who reads the lines.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PATIENCE = 10.0  # seconds in which the others must have come
PAYLOAD = 8 << 20  # bytes of one exchange
ROUNDS = 4  # exchanges at most: what is slow shows in the first
WORK = 0.3  # seconds of matrix products, thrice

TORCH = f"""
import json, time, torch
has = lambda kind: hasattr(torch, kind) and getattr(torch, kind).is_available()
kind = next(filter(has, ("cuda", "xpu")), "cpu")
module, found = getattr(torch, kind), []
for index in range(module.device_count() if kind != "cpu" else 1):
    device = torch.device(kind, index) if kind != "cpu" else torch.device("cpu")
    n = 4096 if kind != "cpu" else 256
    x, rates = torch.ones(n, n, device=device), []
    # A processor by its own seconds: what else runs there takes none of them.
    clock = time.process_time if kind == "cpu" else time.monotonic
    x @ x
    for _ in range(3):
        begin, end, count = clock(), time.monotonic() + {WORK}, 0
        while time.monotonic() < end:
            y = x @ x
            module.synchronize(*[device] * (kind != "cpu"))
            count += 1
        # Where others had the processor, too, and its caches, it says nothing of how fast it is.
        if (worked := clock() - begin) > 0.8 * {WORK}:
            rates.append(2e-9 * n**3 * count / worked)
    free = torch.cuda.mem_get_info(index)[0] if kind == "cuda" else 0
    found.append(dict(rates=rates, right=float(y[0, 0]) == n, free=free))
print(json.dumps(dict(torch=torch.__version__, kind=kind, devices=found)))
"""


def look_at_torch() -> dict[str, object]:
    """Return what torch's devices do, by a process of its own: a broken driver may hang it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH], capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return {"torch_error": "torch and its devices do not answer"}
    if done.returncode == 0:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return {} if "No module named 'torch'" in said else {"torch_error": said[:200]}


def look_at_system() -> dict[str, object]:
    found: dict[str, object] = {"python": platform.python_version()}
    for name in ("ezpz-launch", "ezpz-suite"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            found["driver"] = " ".join(file.readline().split())
    except OSError:
        pass
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            found["memory"] = 1024 * int(re.findall(r"MemAvailable: +(\d+)", file.read())[0])
    except (OSError, IndexError):
        pass
    folder = os.environ.get("TMPDIR") or "/tmp"
    try:
        disk = os.statvfs(folder)
        found["disk"] = disk.f_bavail * disk.f_frsize
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        found["disk_error"] = f"{folder}: {error.strerror}"
    found["kernel"] = kernel_errors()
    return found


def throttled() -> float:
    """Return the seconds for which a bound on this cgroup has kept us from running; 0 if none."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            path = re.findall(r"^(?:0:|\d+:[^:]*\bcpu\b[^:]*:):?(.*)$", file.read(), re.MULTILINE)
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/cpu"):
            for each in path:
                file_name = f"{root}{each.removeprefix(':')}/cpu.stat"
                if os.path.exists(file_name):
                    with open(file_name, encoding="utf-8") as file:
                        stat = dict(line.split() for line in file)
                    micro, nano = stat.get("throttled_usec", 0), stat.get("throttled_time", 0)
                    return 1e-6 * int(micro) + 1e-9 * int(nano)
    except (OSError, ValueError):
        pass
    return 0.0


def kernel_errors() -> list[str]:
    """Return lines of the last hour that speak of broken hardware, where users may read them."""
    try:
        told = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=5, check=False)
        with open("/proc/uptime", encoding="ascii") as file:
            now = float(file.read().split()[0])
    except (OSError, subprocess.TimeoutExpired):
        return []
    # Xid: NVIDIA's catalogue; as faults.toml has it.
    bad = r"NVRM: Xid[^\n]*: (48|64|74|79|95|119|120)\b|Machine check events logged|I/O error, dev"
    lines = re.findall(rf"^\[ *([\d.]+)\] (.*(?:{bad}).*)$", told.stdout, re.MULTILINE)
    return [line[1][:200] for line in lines if now - float(line[0]) < 3600][-3:]


def read(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        if not (chunk := connection.recv(min(1 << 20, count - len(data)))):
            raise ConnectionError
        data += chunk
    return bytes(data)


def put(connection: socket.socket, value: object) -> None:
    text = json.dumps(value).encode()
    connection.sendall(struct.pack("<I", len(text)) + text)


def get(connection: socket.socket) -> Any:
    return json.loads(read(connection, struct.unpack("<I", read(connection, 4))[0]))


def meet(node: int, count: int, mine: int) -> tuple[dict[int, tuple[str, int]], float]:
    """Return where the nodes listen that have come, and by how much our clock differs from 0's."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until = time.monotonic() + PATIENCE
    if node:
        while True:
            try:
                hub = socket.create_connection(place, 1)
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        hub.settimeout(2 * PATIENCE)
        put(hub, [os.environ["EZPZ_LAUNCH_ID"], node, mine])
        get(hub)
        put(hub, time.time())
        table, offset = get(hub)
        return {int(key): tuple(value) for key, value in table.items()}, offset
    table = {0: (place[0], mine)}
    came: dict[int, tuple[socket.socket, float]] = {}
    with socket.create_server(("", place[1]), backlog=1024) as server:
        while len(came) < count - 1 and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                other, address = server.accept()
                other.settimeout(2)
                launch, number, port = get(other)
                if launch != os.environ["EZPZ_LAUNCH_ID"]:
                    continue
                begin = time.time()
                put(other, "clock")
                clock, end = get(other), time.time()
            except (OSError, ValueError, TypeError):
                continue
            table[number] = (address[0], port)
            came[number] = other, clock - (begin + end) / 2
    for other, offset in came.values():
        put(other, [table, offset])
    return table, 0.0


def exchange(node: int, table: dict[int, tuple[str, int]], server: socket.socket) -> list[float]:
    """Return the rates, in MB/s, of exchanges with one partner after another."""
    rates, order = [], sorted(table)
    place = order.index(node)
    for round_number in range(min(ROUNDS, (len(order) - 1).bit_length())):
        other = place ^ (1 << round_number)
        if other >= len(order):
            continue
        try:
            if place > other:
                link = socket.create_connection(table[order[other]], PATIENCE)
            else:
                server.settimeout(PATIENCE)
                link, _ = server.accept()
            with link:
                link.settimeout(PATIENCE)
                begin = time.monotonic()
                sender = threading.Thread(target=link.sendall, args=(bytes(PAYLOAD),))
                sender.start()
                read(link, PAYLOAD)
                sender.join()
                rates.append(2e-6 * PAYLOAD / (time.monotonic() - begin))
        except OSError:
            rates.append(0.0)
    return rates


def main() -> None:
    node, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, object] = {"node": node, **look_at_system()}
    with socket.create_server(("", 0)) as server:
        try:
            table, found["clock"] = meet(node, count, server.getsockname()[1])
            found["links"] = exchange(node, table, server)
        except OSError as error:
            found["link_error"] = str(error)
    # Last: then no node waits for a slow one.
    before, begin = throttled(), time.monotonic()
    found |= look_at_torch()
    found["throttled"] = (throttled() - before) / (time.monotonic() - begin)
    print(f"\npreflight {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
