"""Which launcher to use: the user's word, else the machine's, else what is here."""

from __future__ import annotations

from collections.abc import Mapping

from ezpz_topo import Topology

from ._errors import LaunchError
from ._identify import Launcher, find_command, find_mpiexec
from ._request import Request

_MPIEXEC_KINDS = ("pals", "hydra", "openmpi")


def choose_launcher(
    topology: Topology, request: Request, env: Mapping[str, str], *, beside: str
) -> Launcher:
    """Find the launcher and identify it.

    Args:
        topology: Where we are.
        request: What the user asked for.
        env: The environment whose PATH is searched.
        beside: Directory of this environment's commands, for a venv that is not activated.

    Raises:
        LaunchError: It is not here, or is another one than was asked for.
    """
    asked = request.launcher
    if asked == "auto":
        # One host of a Slurm job needs no srun, which would wait for the cores of this step.
        job = topology.allocation
        several = (job.num_nodes > 1 and request.nodes != 1) or not job.on_node
        if job.scheduler == "slurm" and several:
            return find_command("srun", "srun", env, beside=beside)
        name = "mpirun" if topology.machine.launcher == "openmpi" else "mpiexec"
        return find_mpiexec(env, beside=beside, name=name)
    if asked in ("srun", "torchrun"):
        return find_command(asked, asked, env, beside=beside)
    found = find_mpiexec(env, beside=beside)
    if asked in _MPIEXEC_KINDS and found.kind != asked:
        raise LaunchError(
            f"--launcher {asked}: {found.path} is {found.kind} ({found.source}); expected {asked} "
            "first on PATH; load its module"
        )
    return found


def imagine_launcher(topology: Topology, request: Request) -> Launcher:
    """Return the launcher that a machine's file names, without looking for it."""
    kind = topology.machine.launcher if request.launcher == "auto" else request.launcher
    kind = "hydra" if kind == "mpiexec" else kind
    program = {"openmpi": "mpirun", "srun": "srun", "torchrun": "torchrun"}.get(kind, "mpiexec")
    return Launcher(program, kind, f"{topology.machine.name}.toml, not looked for")
