"""The programs that ``hatch run bench:launch`` starts, and how long it takes until they run."""

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from callee import environment, last_line
from paired import MeasureError

RANK = """
import os, sys, time
began = time.time()
rank = os.environ.get("RANK") or os.environ.get("PMI_RANK") or os.environ["SLURM_PROCID"]
"""
NOTE = """
with open(os.path.join(sys.argv[1], rank), "w") as file:
    file.write(repr(began))
"""
PROGRAMS = {
    "first-line": RANK + NOTE,
    "ready": RANK
    + """
import torch.distributed as dist
os.environ.update(RANK=rank, WORLD_SIZE="2")
dist.init_process_group("gloo")
dist.barrier()
began = time.time()
dist.destroy_process_group()
"""
    + NOTE,
}
SUBMIT = """
import os, runpy, sys, time
import submitit
def rank(program, folder):
    os.environ["RANK"] = os.environ["SUBMITIT_LOCAL_GLOBALID"]
    sys.argv[1:] = [folder]
    runpy.run_path(program)
if __name__ == "__main__":
    executor = submitit.LocalExecutor(sys.argv[2] + "/submitit")
    executor.update_parameters(tasks_per_node=2, timeout_min=5)
    executor.submit(rank, sys.argv[1], sys.argv[2]).wait()
"""


class Programs:
    """The rank programs as files, and what it takes from the start of a command to them."""

    def __init__(self, folder: str, env: dict[str, str]) -> None:
        self.folder, self.env, self.turn = folder, env, 0
        for name, text in PROGRAMS.items():
            Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
        Path(folder, "submit.py").write_text(SUBMIT, encoding="utf-8")

    def until(self, program: str, words: list[str]) -> float:
        """Return the seconds until the later of two ranks was there."""
        self.turn += 1
        # A port that the rendezvous before it has not just left.
        env = self.env | {"MASTER_PORT": str(20000 + (os.getpid() * 7 + self.turn) % 10000)}
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(self.folder, f"{program}.py"))
            began = time.time()
            run([*words, path, folder], env)
            notes = [path for path in Path(folder).iterdir() if path.is_file()]
            if len(notes) != 2:
                raise LaunchError(f"{words[0]}: {len(notes)} of 2 ranks wrote when they came")
            return max(float(path.read_text(encoding="utf-8")) for path in notes) - began

    def submitit(self, python: str) -> list[str]:
        """Return the words before a program for submitit."""
        return [python, str(Path(self.folder, "submit.py"))]


class LaunchError(MeasureError):
    """A launch failed, or not all of its ranks came."""


def run(words: list[str], env: Mapping[str, str]) -> None:
    """Run a command that must succeed.

    Raises:
        LaunchError: It did not.
    """
    done = subprocess.run(
        words, env=env, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        raise LaunchError(f"{words[0]} ended with {done.returncode}: {last_line(done.stderr)}")


def local_environment() -> dict[str, str]:
    """Return the variables for launches on this machine."""
    scripts = sysconfig.get_path("scripts")
    env = environment() | {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": loopback()}
    env["PATH"] = os.pathsep.join([scripts, env["PATH"]])
    # Each launcher has its own way with threads: nobody's is set for it.
    env.pop("OMP_NUM_THREADS", None)
    return env


def loopback() -> str:
    """Return the name of the loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"
