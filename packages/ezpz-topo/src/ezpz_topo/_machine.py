"""A machine: what is known of it, as its file says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ._accelerators import DEVICE_TYPES
from ._machine_file import (
    BACKENDS,
    LAUNCHERS,
    SCHEDULERS,
    Reader,
    has_key,
    read_document,
    read_text,
)


@dataclass(frozen=True, slots=True)
class Option:
    """Flags, variables and modules of a machine that are used only when asked for.

    Attributes:
        why: When to use it, in words for people.
        flags: Added to the launcher's flags.
        environment: Added to the ranks' environment.
        modules: Loaded instead of the machine's.
        backend: Instead of the machine's first, or ``""``.
        cpu_bind: Bind list to use with it; ``"none"`` where the flags bind; ``""`` for any.
    """

    why: str
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    backend: str = ""
    cpu_bind: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of one machine, as its file has them; docs/machines.md explains every key.

    Attributes:
        name: The file's name without ``.toml``.
        site: Who runs it.
        scheduler: ``"slurm"``, ``"pbs"`` or ``"none"``.
        launcher: ``"pals"``, ``"srun"``, ...; ``"mpiexec"`` where it must be asked which it is.
        source: Addresses or titles of what the facts were read from.
        date: When, as ``"2026-08"``.
        nodes: Number of nodes of the machine.
        devices_per_node: As torch counts them (tiles, GCDs); None where the host must tell.
        cores_per_node: CPU cores of a node, where the source tells.
        device_type: torch's word (ROCm is ``"cuda"``); ``""`` where the host must tell.
        backends: torch.distributed backends, best first; the next one is for a torch without.
        cpu_bind: Bind lists by name: one range of cores such as ``"4-7"`` a local rank.
        default_cpu_bind: Which of them; ``""`` where there is none.
        reserved_cores: Cores that no rank may use.
        launcher_flags: Flags beyond counts, hostfile and binding, which the launcher adds.
        environment: Variables that each rank needs.
        options: What is used when asked for, by name.
        hsn_suffix: Makes a short host name the one on the high-speed network.
        module_paths: Arguments of ``module use``.
        modules: Arguments of ``module load``.
        conda_environment: Argument of ``conda activate``, after the modules.
        proxy: HTTP proxy of the compute nodes.
        advice: What people should know.
        inferred: Dotted keys whose values we inferred.
        predecessor: Dotted keys whose values only the predecessor project gives; ``"*"`` for all.
        path: The file.
        matched_by: The rule that chose this machine, with its value.
        notes: What was seen and set aside, in words for people.
    """

    name: str
    site: str
    scheduler: str
    launcher: str
    source: tuple[str, ...]
    date: str
    nodes: int | None = None
    devices_per_node: int | None = None
    cores_per_node: int | None = None
    device_type: str = ""
    backends: tuple[str, ...] = ()
    cpu_bind: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    default_cpu_bind: str = ""
    reserved_cores: tuple[int, ...] = ()
    launcher_flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)
    hsn_suffix: str = ""
    module_paths: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    conda_environment: str = ""
    proxy: str = ""
    advice: tuple[str, ...] = ()
    inferred: tuple[str, ...] = ()
    predecessor: tuple[str, ...] = ()
    path: str = field(default="", compare=False)
    matched_by: str = field(default="", compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)


_FACTS = Machine.__slots__[:-3]


def read_machine(name: str, files: Mapping[str, str]) -> Machine:
    """Read and validate one machine's file."""
    path = files[name]
    reader = Reader(path, read_document(read_text(path), path))
    reader.only([*_FACTS[1:], "match"])
    devices = reader.count("devices_per_node")
    device_type = reader.text("device_type", DEVICE_TYPES)
    if devices is not None and (device_type in ("", "cpu")) != (devices == 0):
        reader.fail("devices_per_node", devices, "0 for cpu, more for cuda, xpu and mps")
    binds = reader.binds(devices)
    reader.rules()
    for mark in ("inferred", "predecessor"):
        for key in reader.texts(mark):
            if key != "*" and not has_key(reader.document, key):
                reader.fail(mark, key, "keys of this file, such as environment.TMPDIR")
    return Machine(
        name=name,
        site=reader.text("site", required=True),
        scheduler=reader.text("scheduler", SCHEDULERS, required=True),
        launcher=reader.text("launcher", LAUNCHERS, required=True),
        source=reader.texts("source", required=True),
        date=reader.date(),
        nodes=reader.count("nodes"),
        devices_per_node=devices,
        cores_per_node=reader.count("cores_per_node"),
        device_type=device_type,
        backends=reader.texts("backends", BACKENDS),
        cpu_bind=binds,
        default_cpu_bind=reader.text("default_cpu_bind", tuple(binds), required=bool(binds)),
        reserved_cores=reader.counts("reserved_cores"),
        launcher_flags=reader.texts("launcher_flags"),
        environment=reader.variables("environment"),
        options={key: _option(table, (*binds, "none")) for key, table in reader.tables("options")},
        hsn_suffix=reader.text("hsn_suffix"),
        module_paths=reader.texts("module_paths"),
        modules=reader.texts("modules"),
        conda_environment=reader.text("conda_environment"),
        proxy=reader.text("proxy"),
        advice=reader.texts("advice"),
        inferred=reader.texts("inferred"),
        predecessor=reader.texts("predecessor"),
        path=path,
    )


def _option(reader: Reader, binds: tuple[str, ...]) -> Option:
    reader.only(Option.__slots__)
    return Option(
        why=reader.text("why", required=True),
        flags=reader.texts("flags"),
        environment=reader.variables("environment"),
        modules=reader.texts("modules"),
        backend=reader.text("backend", BACKENDS),
        cpu_bind=reader.text("cpu_bind", binds),
    )
