"""Worlds of ranks on this machine: a program that is started once a rank, with its job as JSON."""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from callee import last_line
from paired import MeasureError

LIMIT = 900.0
"""Seconds that a world may take, when it is not a section's of bench:all, which has 600."""


class RanksError(MeasureError):
    """A rank failed, or the world was not done in time."""


def ranks(script: str, job: dict[str, Any], processes: int = 1) -> Any:
    """Run one world in processes of its own and return what its rank 0 printed as JSON.

    The ranks compute on the CPU, also beside an accelerator, unless the job's ``world`` names
    CUDA or NCCL.

    Args:
        script: A file beside this one. Its argument is the job, with ``rank``, ``ranks`` and the
            ``port`` of a store that is open until the end.
        job: What JSON can hold.
        processes: How many ranks.

    Raises:
        RanksError: A rank failed: the first, and what it said last; the others are ended.
    """
    path = str(Path(__file__).parent / script)
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if sys.platform == "darwin":
        env["GLOO_SOCKET_IFNAME"] = "lo0"
    if job.get("world") not in {"fake cuda", "nccl"}:
        env["TORCH_DEVICE"] = "cpu"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [job | {"rank": n, "ranks": processes, "port": store.port} for n in range(processes)]
    with ExitStack() as open_files:
        # Files: a rank whose pipe is full would keep the others waiting.
        outputs = [
            tuple(open_files.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            for _ in jobs
        ]
        running = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", path, json.dumps(each)],
                env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            )
            for each, (output, errors) in zip(jobs, outputs, strict=True)
        ]  # fmt: skip
        try:
            first = _first_failure(running)
        finally:
            for process in running:
                process.kill()
                process.wait()
        if first is not None:
            said = _text(outputs[first][1])
            print(said, file=sys.stderr)
            why = last_line(said) or f"ended with {running[first].returncode}"
            raise RanksError(f"{Path(path).name}, rank {first}: {why}")
        return json.loads(_text(outputs[0][0]).splitlines()[-1])


def _first_failure(running: list[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all have ended, or one failed; return its rank."""
    deadline = time.monotonic() + LIMIT
    while True:
        ended = [process.poll() for process in running]
        for rank, status in enumerate(ended):
            if status:
                return rank
        if None not in ended:
            return None
        if time.monotonic() > deadline:
            raise RanksError(f"not done after {LIMIT:.0f} s")
        time.sleep(0.1)


def _text(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
