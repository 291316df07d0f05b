"""What a launcher adds: ``hatch run bench:launch [--runs=9] [--json=FILE]``.

Two ranks are started by ezpz-launch, bare mpiexec, torchrun, accelerate and submitit, in turn, and
compared as ratios: to the later rank's first line, and to its process group. A real Slurm is
started where one is installed. Planning is measured in this process, for 10,080 nodes x 12 ranks.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import fire
from launch_programs import LaunchError, Programs, local_environment, run
from paired import Row, absent, against, alone, interleaved, seconds, times
from peers import present
from slurm_here import SlurmJobError, SlurmMissingError, in_a_job
from table import finish, read

from ezpz_launch import Request, plan
from ezpz_launch._plan.kind import Launcher
from ezpz_launch._plan.launchers import build_argv, build_hostfile
from ezpz_topo import imagine

WHAT = {
    "first-line": "start to the first line of 2 ranks",
    "ready": "start to the process group of 2 ranks",
}


def here(runs: int) -> list[Row]:
    """Return the rows of the launchers that need no cluster."""
    there, missing = present(["accelerate", "submitit"])
    torch = f"torchrun {_version('torch')}"
    titles = {"mpiexec": f"mpiexec, MPICH {_version('mpich')}", "torchrun": torch}
    titles |= {name: each.name for name, each in there.items()}
    words = {
        "ours": ["ezpz-launch", "-n", "2"],
        "mpiexec": ["mpiexec", "-n", "2"],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node=2"],
    }
    if "accelerate" in there:
        # Its name for "several processes"; what they run on is not asked here.
        kind = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
        module = ["-m", "accelerate.commands.launch", *kind, "--dynamo_backend=no"]
        words["accelerate"] = [there["accelerate"].python, *module]
    env = local_environment()
    rows = []
    if not shutil.which("mpiexec", path=env["PATH"]):
        missing["mpiexec"] = "mpiexec is not on PATH"
        del words["mpiexec"], titles["mpiexec"]
        words["ours"] = ["ezpz-launch", "--launcher", "spawn", "-n", "2"]
    with tempfile.TemporaryDirectory() as folder:
        programs = Programs(folder, env)
        for program, what in WHAT.items():
            ways = {
                name: partial(programs.until, program, [*before, *python(name)])
                for name, before in words.items()
            }
            absent_here = dict(missing)
            if program == "ready":
                # Its ranks run in its own environment, which has no torch.
                absent_here.pop("submitit", None)
            elif "submitit" in there:
                submit = programs.submitit(there["submitit"].python)
                ways["submitit"] = partial(programs.until, program, submit)
            samples = interleaved(ways, runs, failed=absent_here)
            named = {name: title for name, title in titles.items() if name in ways}
            rows += against(f"launch/{program}", what, "s", samples, named, missing=absent_here)
        rows += true_of(words, env, titles, missing, runs)
    return [*rows, *peaks(words, env, titles, missing)]


def python(name: str) -> list[str]:
    """Return what stands before a script: torchrun and accelerate bring their own."""
    return [] if name in {"torchrun", "accelerate"} else [sys.executable]


def true_of(
    words: Mapping[str, list[str]],
    env: Mapping[str, str],
    titles: Mapping[str, str],
    missing: Mapping[str, str],
    runs: int,
) -> list[Row]:
    """Return the rows of a launch of `true`: what the launcher alone costs."""
    names = [name for name in ("ours", "mpiexec", "srun") if name in words]
    ways = {name: partial(seconds, partial(run, [*words[name], "true"], env)) for name in names}
    samples = {name: times(1e3, found) for name, found in interleaved(ways, 2 * runs).items()}
    named = {name: titles[name] for name in names if name != "ours"}
    gone = {name: why for name, why in missing.items() if name == "mpiexec"}
    return against("launch/true", "-n 2 true", "ms", samples, named, missing=gone)


def peaks(
    words: Mapping[str, list[str]],
    env: Mapping[str, str],
    titles: Mapping[str, str],
    missing: Mapping[str, str],
) -> list[Row]:
    """Return the rows of what a launcher's own process holds while ranks run."""
    if sys.platform != "linux":
        return [absent("launch/memory", "memory of the launcher", "", "read from /proc")]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "wait.py")
        script.write_text("import time; time.sleep(0.5)", encoding="utf-8")
        ways = {
            name: partial(peak_of, [*before, *python(name), str(script)], env)
            for name, before in words.items()
        }
        # Of submitit it is not measured.
        gone = {name: why for name, why in missing.items() if name != "submitit"}
        held = interleaved(ways, 1, warm=0, failed=gone)
    named = {name: title for name, title in titles.items() if name in ways}
    return against("launch/memory", "memory of the launcher", "MB", held, named, missing=gone)


def peak_of(words: list[str], env: Mapping[str, str]) -> float:
    """Return the most memory that a command's first process held until its end, in MB.

    Raises:
        LaunchError: It failed.
    """
    peak = 0.0
    null = subprocess.DEVNULL
    with subprocess.Popen(words, env=env, stdin=null, stdout=null, stderr=null) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
            if "VmHWM:" in status:
                peak = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
            time.sleep(0.02)
    if process.returncode:
        raise LaunchError(f"{words[0]} ended with {process.returncode}")
    return peak


def under_slurm(runs: int) -> list[Row]:
    """Return the rows of srun: this program once more, in a job of a private Slurm."""
    keys = {f"launch/{name}/srun": what for name, what in WHAT.items()}
    keys["launch/true/srun"] = "-n 2 true"
    with tempfile.TemporaryDirectory() as folder:
        found = str(Path(folder, "found.json"))
        words = [sys.executable, __file__, f"--runs={runs}", "--in_job", f"--json={found}"]
        try:
            in_a_job(words)
        except SlurmMissingError as error:
            return [absent(key, what, "srun", str(error)) for key, what in keys.items()]
        except SlurmJobError as error:
            rows = [absent(key, what, "srun", str(error)) for key, what in keys.items()]
            # A Slurm is here, so it is not a peer that is missing.
            return [*rows, absent("launch/slurm/section", "what runs in Slurm", "", str(error))]
        return read(found)[1]


def here_in_a_job(runs: int) -> list[Row]:
    """Return the rows of srun, in the job that this process runs in."""
    env = local_environment()
    # The names of the private Slurm's nodes resolve to nothing: nobody can name the address.
    given = ["--env", "MASTER_ADDR=127.0.0.1"]
    words = {"ours": ["ezpz-launch", "-n", "2", *given], "srun": ["srun", "-N1", "-n2"]}
    version = subprocess.run(["srun", "--version"], capture_output=True, text=True, check=True)
    titles = {"srun": version.stdout.strip().replace("slurm-wlm", "srun, Slurm")}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        programs = Programs(folder, env)
        for program, what in WHAT.items():
            ways = {
                name: partial(programs.until, program, [*before, sys.executable])
                for name, before in words.items()
            }
            rows += against(f"launch/{program}", what, "s", interleaved(ways, runs), titles)
    return [*rows, *true_of(words, env, titles, {}, runs)]


def planning(runs: int) -> list[Row]:
    """Return the rows of planning 10,080 nodes x 12 ranks, with command line and hostfile."""
    rows = []
    for machine, kind in (("aurora", "pals"), ("frontier", "srun"), ("generic-pbs", "hydra")):
        topology = imagine(machine, 10080, {})
        request, launcher = Request(("python", "train.py"), ppn=12), Launcher(kind, kind, "")

        def once(topology=topology, request=request, launcher=launcher) -> float:  # type: ignore[no-untyped-def]
            began = time.perf_counter()
            planned = plan(
                topology, request, launcher, hosts=topology.allocation.hosts, hosts_source="job",
                hostfile="HOSTFILE", port=29500, user_env={},
            )  # fmt: skip
            build_argv(planned)
            build_hostfile(planned)
            return (time.perf_counter() - began) * 1e3

        what = f"plan 10,080 nodes x 12 for {kind}"
        rows.append(alone(f"launch/plan-{kind}", what, "ms", [once() for _ in range(runs + 1)][1:]))
    return rows


def _version(name: str) -> str:
    from importlib.metadata import version  # noqa: PLC0415  # for titles only

    return version(name)


def main(runs: int = 9, json: str = "", in_job: bool = False) -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        runs: How often each command is run.
        json: A file to write the figures to.
        in_job: Only srun, in the Slurm job that this runs in.
    """
    if in_job:
        finish(here_in_a_job(runs), json)
    else:
        rows = [*here(runs), *under_slurm(max(3, runs // 2))]
        places = list(dict.fromkeys(row.what for row in rows))
        rows.sort(key=lambda row: places.index(row.what))
        finish([*rows, *planning(runs)], json)


if __name__ == "__main__":
    fire.Fire(main)
