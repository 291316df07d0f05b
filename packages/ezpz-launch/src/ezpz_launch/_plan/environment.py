"""The variables of ranks: those that a plan adds, and those that an outer launch leaves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ezpz_launch._plan.kind import Env, Launcher
from ezpz_launch._plan.launchers import LAUNCHERS
from ezpz_launch._plan.machine_options import SelectedOptions
from ezpz_launch._plan.options import Request
from ezpz_launch._plan.placement import Arrangement
from ezpz_topo import FAMILIES, Machine, Topology, family

Variables = dict[str, tuple[str, str]]
"""For each variable its value and the reason."""


class RankEnvironment(NamedTuple):
    """The variables that a plan adds to the ranks' environment."""

    values: Mapping[str, str]
    sources: Mapping[str, str]  # for each variable the reason
    notes: tuple[str, ...]  # for people


def build_rank_environment(
    topology: Topology,
    request: Request,
    arrangement: Arrangement,
    launcher: Launcher,
    selected: SelectedOptions,
    *,
    cores_per_rank: int,
    port: int,
    user_env: Env,
) -> RankEnvironment:
    machine = topology.machine
    user_variables = find_user_variables(user_env)
    added = _choose_rendezvous(machine, arrangement, port)
    if "OMP_NUM_THREADS" not in user_variables:
        added |= _count_threads(arrangement, cores_per_rank)

    foreign = _find_foreign_variables(machine, launcher)
    notes: tuple[str, ...] = ()
    if foreign:
        note = (
            f"{', '.join(foreign)} of {machine.name}.toml are for {machine.launcher}, and left "
            f"out under {launcher.kind}"
        )
        notes = (note,)

    defaults = _list_machine_variables(machine, foreign)
    defaults |= selected.environment
    defaults |= _limit_nccl_roots(topology, arrangement.placement.nproc)
    for name, value_and_source in defaults.items():
        if name not in user_variables:
            added[name] = value_and_source
    for name in added.keys() & (user_env.keys() - user_variables):
        value, source = added[name]
        added[name] = (value, f"{source}; {user_env[name]} is PBS's, not the user's")

    kind = LAUNCHERS[launcher.kind]
    added |= kind.build_environment(launcher, on_this_host=arrangement.on_this_host)
    if request.machine:
        # The ranks are on the machine that the user named, whatever their host looks like.
        added["EZPZ_MACHINE"] = (request.machine, "--machine")
    for pair in request.env:
        name, _, value = pair.partition("=")
        added[name] = (value, "--env")

    values: dict[str, str] = {}
    sources: dict[str, str] = {}
    for name, (value, source) in added.items():
        values[name] = value
        sources[name] = source
    return RankEnvironment(values, sources, notes)


def _choose_rendezvous(machine: Machine, arrangement: Arrangement, port: int) -> Variables:
    if arrangement.on_this_host:
        address = "127.0.0.1"
        source = "every rank is on this host"
        port_source = "a free port of this host, a new one for each launch"
    else:
        address = arrangement.placement.hosts[0]
        source = "the first host"
        port_source = "a port below the ephemeral ones, a new one for each launch"
        is_name = not address.replace(".", "").isdigit() and ":" not in address
        if machine.hsn_suffix and is_name:
            address = address.partition(".")[0] + machine.hsn_suffix
            source += f", on the fast network ({machine.name}.toml)"
    return {"MASTER_ADDR": (address, source), "MASTER_PORT": (str(port), port_source)}


def _count_threads(arrangement: Arrangement, cores_per_rank: int) -> Variables:
    if cores_per_rank:
        threads = cores_per_rank
        source = "the cores that each rank is given"
    elif arrangement.cores:
        ranks = arrangement.placement.ppn
        threads = max(1, arrangement.cores // ranks)
        source = f"{arrangement.cores} cores / {ranks} ranks, at least 1"
    else:
        return {}
    return {"OMP_NUM_THREADS": (str(threads), source)}


_LAUNCHER_SPECIFIC = ("CCL_PROCESS_LAUNCHER", "CCL_ATL_TRANSPORT", "CCL_KVS_MODE", "PALS_")
"""True under the machine's own launcher only; others expect oneCCL's own choice (Hydra, OFI)."""


def _find_foreign_variables(machine: Machine, launcher: Launcher) -> list[str]:
    """Find the variables of the machine's file that are for another launcher than this one."""
    if launcher.kind == machine.launcher:
        return []
    if machine.launcher == "mpiexec" and LAUNCHERS[launcher.kind].is_mpiexec:
        return []
    return [name for name in machine.environment if name.startswith(_LAUNCHER_SPECIFIC)]


def _list_machine_variables(machine: Machine, left_out: Collection[str]) -> Variables:
    variables: Variables = {}
    for name, value in machine.environment.items():
        if name not in left_out:
            variables[name] = (value, f"{machine.name}.toml")
    return variables


_NCCL_ROOTS = 64


def _limit_nccl_roots(topology: Topology, nproc: int) -> Variables:
    """Limit what NCCL or RCCL reads: by default a number for each 128 ranks, all by every rank."""
    if nproc <= 128 * _NCCL_ROOTS or topology.accelerators.device_type != "cuda":
        return {}
    source = f"each rank reads {_NCCL_ROOTS} numbers of NCCL's from rank 0, not {nproc // 128}"
    return {"TORCH_NCCL_RANKS_PER_ROOT": (str(-(-nproc // _NCCL_ROOTS)), source)}


def find_user_variables(env: Env) -> set[str]:
    """Find the variables that the user chose: those that PBS sets for each job are not among them.

    OpenPBS 23.06 (start_exec.c): OMP_NUM_THREADS and NCPUS are one number, and TMPDIR is a folder
    of the job, /var/tmp/pbs.<job id> by default.
    """
    names = set(env)
    if env.get("PBS_ENVIRONMENT"):
        if env.get("NCPUS") and env.get("OMP_NUM_THREADS") == env["NCPUS"]:
            names.discard("OMP_NUM_THREADS")
        job_id = env.get("PBS_JOBID")
        if job_id and job_id in env.get("TMPDIR", ""):
            names.discard("TMPDIR")
    return names


def describe_unused_rendezvous(environment: Env, request: Request, user_env: Env) -> str:
    """Describe the MASTER_ADDR and MASTER_PORT of the user that ranks do not get; '' if none."""
    # They are mostly left over from another launch or written for torchrun, and a fixed port is
    # soon another launch's.
    requested = {pair.partition("=")[0] for pair in request.env}
    pairs: list[str] = []
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        value = user_env.get(name, environment[name])
        if name not in requested and value != environment[name]:
            pairs.append(f"{name}={value}")
    if not pairs:
        return ""
    verb = "is"
    if len(pairs) > 1:
        verb = "are"
    options = " ".join(f"--env {pair}" for pair in pairs)
    return (
        f"{' and '.join(pairs)} of the environment {verb} not used: "
        f"the ranks meet at {environment['MASTER_ADDR']}:{environment['MASTER_PORT']}, a new place "
        f"for each launch; to have yours: {options}"
    )


# A launch inside a rank of another is cut off from the outer one's variables.


def strip_launcher_env(env: Env) -> dict[str, str]:
    """Remove the rank variables that an outer launcher set."""
    rank_variables = _list_rank_variables()
    if env.get("EZPZ_LAUNCHER") or env.get("TORCHELASTIC_RUN_ID"):
        # Where the outer ranks meet; in a rank of another launcher it is the user's choice.
        rank_variables |= {"MASTER_ADDR", "MASTER_PORT"}
    rank_prefixes: tuple[str, ...] = ()
    setting_prefixes: tuple[str, ...] = ()
    for kind in LAUNCHERS.values():
        rank_prefixes += kind.rank_prefixes
        setting_prefixes += kind.setting_prefixes
    stripped: dict[str, str] = {}
    for name, value in env.items():
        is_of_rank = name.startswith(rank_prefixes) and not name.startswith(setting_prefixes)
        if name not in rank_variables and not is_of_rank:
            stripped[name] = value
    return stripped


def _list_rank_variables() -> set[str]:
    slurm = family("slurm")
    names: set[str] = set()
    for each in FAMILIES:
        names.update(each.rank, each.local_rank)
        # Slurm's other variables describe a step's cores, and make no process a rank.
        if each is not slurm:
            names.update(each.world_size, each.local_world_size)
            names.update(each.node_rank, each.num_nodes, each.proof)
    return names
