"""Worlds of ranks on this machine: a program that is started once a rank, with its job as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist


def ranks(script: str, job: dict[str, Any], processes: int = 1) -> Any:
    """Run one world in processes of its own and return what its rank 0 printed as JSON.

    Args:
        script: A file beside this one. Its argument is the job, with ``rank``, ``ranks`` and the
            ``port`` of a store that is open until the end.
        job: What JSON can hold.
        processes: How many ranks.
    """
    path = str(Path(__file__).with_name(script))
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if sys.platform == "darwin":
        env["GLOO_SOCKET_IFNAME"] = "lo0"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [job | {"rank": n, "ranks": processes, "port": store.port} for n in range(processes)]
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", path, json.dumps(each)],
            env=env, stdout=subprocess.PIPE, text=True,
        )
        for each in jobs
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=900)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise SystemExit(f"{script} {json.dumps(job)} failed; see above")
    return json.loads(outputs[0].splitlines()[-1])
