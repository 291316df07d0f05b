"""The check ``network``: variables of NCCL, libfabric, oneCCL and gloo, against this host.

The machines' variables are those of their files; not run on hardware.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from ezpz_topo._allocation import Allocation, get_allocation
from ezpz_topo._errors import SchedulerError, TopoError
from ezpz_topo._hosts import short_name
from ezpz_topo._machine import Machine
from ezpz_topo._match import get_machine_info

from .interfaces import VARIABLES, Choice, chosen
from .result import CheckResult

_PREFIXES = ("NCCL_", "RCCL_", "CCL_", "FI_", "GLOO_", "UCX_", "MPICH_", "PALS_", "TORCH_NCCL_")
"""Beginnings of the variables that say how ranks reach each other."""

_SLOW = {
    "NCCL_IB_DISABLE": "NCCL leaves InfiniBand and RoCE alone",
    "NCCL_P2P_DISABLE": "NCCL copies between GPUs of a host through its memory",
    "NCCL_SHM_DISABLE": "NCCL talks within a host through its network",
}
"""NCCL's documentation, "Environment variables"."""


def check(_seconds: float, env: Mapping[str, str] | None = None, *, root: str = "/") -> CheckResult:
    """Compare the variables of the high-speed network with the machine's file and this host.

    Args:
        _seconds: How long it may take; only the resolver takes any, and knows no limit.
        env: The environment to read; default ``os.environ``.
        root: Where ``sys`` is found; for tests.
    """
    env = os.environ if env is None else env
    try:
        machine, job = get_machine_info(env), _job(env)
    except TopoError as error:
        return CheckResult.of(error)
    set_here = {name: env[name] for name in sorted(env) if name.startswith(_PREFIXES)}
    facts: dict[str, object] = {"machine": machine.name, "variables": set_here}
    names = [name for _, name in socket.if_nameindex()]
    several = job is not None and job.num_nodes > 1
    for variable, form in VARIABLES.items():
        if env.get(variable) and (wrong := _wrong(chosen(form, env[variable], names), several)):
            return CheckResult.error(
                f"{variable}={env[variable]}: {wrong}; this host has {', '.join(names)}",
                f"unset {variable}, or name an interface that every host has",
                interfaces=names, **facts,
            )  # fmt: skip
    if found := _fabric(env, root):
        return CheckResult.error(*found, **facts)
    if several and job is not None and (found := _fast_name(machine, job)):
        return CheckResult.error(*found, **facts)
    if warned := _differing(machine, env) or _slowed(env, root, several=several):
        return CheckResult.warning(*warned, **facts)
    return CheckResult.ok(_all_well(machine, set_here), **facts)


def _job(env: Mapping[str, str]) -> Allocation | None:
    try:
        return get_allocation(env, ask=False)
    except SchedulerError:
        return None  # the check "scheduler" says so


def _wrong(choice: Choice, several: bool) -> str:
    if choice.missing:
        return f"no interface {', '.join(choice.missing)}"
    if not choice.names:
        return "no interface is left"
    if several and all(name in ("lo", "lo0") for name in choice.names):
        return "loopback alone does not reach the other hosts of the job"
    return ""


def _fabric(env: Mapping[str, str], root: str) -> tuple[str, str] | None:
    """Say where libfabric is told to use Slingshot, and this host has none."""
    cards = f"{root.rstrip('/')}/sys/class/cxi"
    asked = "cxi" in env.get("FI_PROVIDER", "").split(",")
    if not asked or os.path.isdir(cards) or not os.path.isdir(os.path.dirname(cards)):
        return None
    return (
        f"FI_PROVIDER={env['FI_PROVIDER']}, and this host has no Slingshot card ({cards})",
        "unset FI_PROVIDER here: it is for the compute nodes",
    )


def _fast_name(machine: Machine, job: Allocation) -> tuple[str, str] | None:
    """Say where the name at which the ranks would meet is none."""
    first = job.hosts[0]
    if not machine.hsn_suffix or not job.on_node or first.replace(".", "").isdigit():
        return None
    name = short_name(first) + machine.hsn_suffix
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        return (
            f"{name}, the first host on the fast network, cannot be looked up: {error}",
            f"ask the site; until then name another: --env MASTER_ADDR={first}",
        )
    return None


def _differing(machine: Machine, env: Mapping[str, str]) -> tuple[str, str] | None:
    for name, value in machine.environment.items():
        also = [each.environment.get(name) for each in machine.options.values()]
        if name.startswith(_PREFIXES) and env.get(name, value) not in (value, *also):
            return (
                f"{name}={env[name]}, where {machine.name}.toml has {value}",
                f"unset {name}, unless it is set on purpose: ezpz-launch then leaves it as it is",
            )
    return None


def _slowed(env: Mapping[str, str], root: str, *, several: bool) -> tuple[str, str] | None:
    cards = _cards(root)
    for name, what in _SLOW.items():
        if env.get(name, "0") in ("", "0"):
            continue
        if name == "NCCL_IB_DISABLE" and not (several and cards):
            continue
        there = f" ({', '.join(cards)})" if name == "NCCL_IB_DISABLE" else ""
        return f"{name}={env[name]}: {what}{there}", f"unset {name}, unless it is a workaround"
    return None


def _cards(root: str) -> Sequence[str]:
    try:
        return sorted(os.listdir(f"{root.rstrip('/')}/sys/class/infiniband"))
    except OSError:
        return ()  # no such card, or no Linux


def _all_well(machine: Machine, set_here: Mapping[str, str]) -> str:
    said = f"{len(set_here)} variables of the network are set" if set_here else "nothing is set"
    told = [name for name in machine.environment if name.startswith(_PREFIXES)]
    if not told:
        return f"{said}, and {machine.name} asks for none"
    missing = [name for name in told if name not in set_here]
    if not missing:
        return f"{said}, all that {machine.name}.toml asks for among them"
    return f"{said}; ezpz-launch sets {', '.join(missing)} ({machine.name}.toml) for each rank"
