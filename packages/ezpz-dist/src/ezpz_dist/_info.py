"""What there is, as plain values and as pictures: the world, and what a model is wrapped by."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import ezpz_device
import ezpz_topo
from ezpz_topo import NodelistError, fold_nodelist

from ._errors import fold, grouped
from ._replicas import find_wrapper, home_of
from ._version import __version__
from ._world import find_world, parallel_state

# The world as a table in text: pure, and readable at ten thousand ranks.

_NODES_SHOWN, _FIRST_NODES = 8, 3  # of more nodes so many first ones, and the last, are shown
_WIDTH = 60  # characters for ranks in columns, and for a folded list of hosts or ranks


def picture(info: Mapping[str, Any], hosts: Sequence[str]) -> str:
    nodes = grouped((host, rank) for rank, host in enumerate(hosts))
    sizes = sorted({len(ranks) for ranks in nodes.values()})
    each = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    s = "s" * (len(hosts) != 1), "s" * (len(nodes) != 1)
    head = f"{len(hosts):,} rank{s[0]} on {len(nodes):,} node{s[1]}"
    lines = [f"{head}, {each} a node" if len(nodes) > 1 else head, *_facts(info), ""]
    return "\n".join(lines + _table(nodes))


def _facts(info: Mapping[str, Any]) -> Iterator[str]:
    job = f", {info['scheduler']} job {info['job_id']}" if info["job_id"] else ""
    started = "one process" if info["launcher"] == "none" else f"started by {info['launcher']}"
    yield f"{started} on {info['machine']}{job}"
    timeout = "" if info["timeout"] is None else f", time-out {info['timeout']:g} s"
    yield f"device {info['device']}, backend {info['backend']}{timeout}"
    if any(degree > 1 for axis, degree in info["degrees"].items() if axis != "data"):
        degrees = (f"{axis} {degree:,}" for axis, degree in info["degrees"].items())
        yield "parallel: " + " x ".join(degrees)
    yield ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    if not info["is_set_up"]:
        yield "not set up yet: this is what the environment says"


def _table(nodes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return a line a node, those in the middle of many as one."""
    rows = [(str(index), host, ranks) for index, (host, ranks) in enumerate(nodes.items())]
    shown = rows if len(rows) <= _NODES_SHOWN else [*rows[:_FIRST_NODES], rows[-1]]
    digits = max(len(str(rank)) for _, _, ranks in shown for rank in ranks)
    in_columns = max(len(ranks) for _, _, ranks in shown) * (digits + 2) <= _WIDTH
    node_width = max(len("node"), *(len(index) for index, _, _ in shown))
    host_width = max(len("host"), *(len(host) for _, host, _ in shown))
    lines = [f"{'node':>{node_width}}  {'host':<{host_width}}  ranks"]
    for index, host, ranks in shown:
        columns = "  ".join(f"{rank:>{digits}}" for rank in ranks)
        text = columns if in_columns else _cut(fold(ranks))
        lines.append(f"{index:>{node_width}}  {host:<{host_width}}  {text}")
    if shown is not rows:
        hidden = rows[_FIRST_NODES:-1]
        ranks = [rank for _, _, own in hidden for rank in own]
        names = [host for _, host, _ in hidden]
        try:
            where = fold_nodelist(names)
        except NodelistError:
            where = ", ".join(names)  # names that no nodelist can hold
        more = f"{len(hidden):,} more: {_cut(where)}, ranks {_cut(fold(ranks))}"
        lines.insert(-1, f"{'...':>{node_width}}  {more}")
    return lines


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 4]} ..."


# What set-up decided, and what the environment says, as plain values.


def get_dist_info() -> dict[str, Any]:
    """Return where this rank is, among whom, and with what; `json.dumps` takes it.

    Not a collective. Before `setup_torch` it is what the environment says, and what set-up
    would choose by it.

    Returns:
        ``is_set_up``, ``rank``, ``world_size``, ``local_rank``, ``local_world_size``,
        ``node_rank``, ``num_nodes`` (the last three None where it is not known), ``hostname``,
        ``hosts`` (each once, by their first rank), ``device``, ``device_type``, ``backend``.
        ``timeout`` (seconds; None before set-up), ``launcher``, ``scheduler``, ``job_id``,
        ``machine``, ``master_addr``, ``master_port`` and ``versions``. ``degrees`` are those of
        the axes tensor, context, pipeline and data (before set-up data is the world size).

    Raises:
        ezpz_topo.TopoError: The environment is half set or contradicts itself.
        ezpz_device.DeviceError: Before set-up: there is no device for this rank.
    """
    import ezpz_tp  # noqa: PLC0415 - only where it is asked

    world = find_world()
    info = ezpz_topo.get_rank_info() if world is None else world.info
    job = _allocation()
    device = torch.device(ezpz_device.get_torch_device() if world is None else world.device)
    hosts = list(job.hosts) or [ezpz_topo.get_hostname()]
    if world is not None:
        hosts = list(dict.fromkeys(world.hosts))
    port = os.environ.get("MASTER_PORT", "")
    degrees = {"tensor": 1, "context": 1, "pipeline": 1, "data": info.world_size}
    if (state := parallel_state()) is not None:
        degrees = {axis: state.size(axis) for axis in degrees}
    return {
        "is_set_up": world is not None, **_place(info),
        "num_nodes": info.num_nodes if world is None else info.num_nodes or len(hosts),
        "hostname": ezpz_topo.get_hostname(), "hosts": hosts,
        "device": str(device), "device_type": device.type,
        "backend": ezpz_device.get_torch_backend() if world is None else world.backend,
        "timeout": None if world is None else world.timeout,
        "launcher": info.launcher, "scheduler": job.scheduler, "job_id": job.job_id,
        "machine": ezpz_topo.get_machine(), "master_addr": os.environ.get("MASTER_ADDR") or None,
        "master_port": int(port) if port.isascii() and port.isdigit() else None, "degrees": degrees,
        "versions": {
            "torch": str(torch.__version__),  # a plain string, for YAML too
            "python": platform.python_version(), "ezpz_dist": __version__,
            "ezpz_topo": ezpz_topo.__version__, "ezpz_device": ezpz_device.__version__,
            "ezpz_tp": ezpz_tp.__version__,
        },
    }  # fmt: skip


def print_dist_setup() -> str:
    """Print a picture of the world on rank 0: its nodes, their ranks, and what they use.

    Not a collective. Of many nodes the first and the last are shown.

    Returns:
        The text, on every rank. Before `setup_torch` only this rank's place is known.

    Raises:
        ezpz_topo.TopoError: As `get_dist_info`.
        ezpz_device.DeviceError: As `get_dist_info`.
    """
    world, info = find_world(), get_dist_info()
    hosts = [info["hostname"]] if world is None else world.hosts
    text = picture(info, hosts)
    if world is None and info["world_size"] > 1:
        text = f"rank {info['rank']} of {info['world_size']}, seen alone: {text}"
    if info["rank"] == 0:
        print(text, flush=True)
    return text


def query_environment(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return this process's place as the launcher's variables tell it, and which these are.

    Args:
        env: The environment to read; default ``os.environ``. Nothing else is asked.

    Returns:
        ``rank``, ``world_size``, ``local_rank``, ``local_world_size``, ``node_rank``,
        ``num_nodes`` (the last three None where it is not known) and ``launcher``. ``sources``
        has the variable or rule of each number. ``variables`` are all of the known launchers'
        that are set, with their values. ``notes`` say what was seen and set aside.

    Raises:
        ezpz_topo.TopoError: The variables are half set or contradict each other.
    """
    env = os.environ if env is None else env
    info = ezpz_topo.get_rank_info(env)
    names = sorted(launch_variables())
    return {
        **_place(info), "launcher": info.launcher, "sources": dict(info.sources),
        "variables": {name: env[name] for name in names if env.get(name)}, "notes": [*info.notes],
    }  # fmt: skip


_PLACE = "rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes"


def _place(info: ezpz_topo.RankInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in _PLACE}


def launch_variables() -> set[str]:
    found = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    for family in ezpz_topo.FAMILIES:
        found.update(*(getattr(family, name) for name in (*_PLACE, "proof")))
        found.add(family.tasks_per_node)
    return found


def _allocation() -> ezpz_topo.Allocation:
    try:
        # No rank may start the scheduler's commands: ten thousand at once take it down.
        return ezpz_topo.get_allocation(ask=False)
    except ezpz_topo.SchedulerError:
        # Only a command could tell the hosts; the job's name is known all the same.
        for scheduler, name in (("slurm", "SLURM_JOB_ID"), ("pbs", "PBS_JOBID")):
            if os.environ.get(name):
                return ezpz_topo.Allocation(scheduler, os.environ[name], ())
        return ezpz_topo.Allocation("unknown", None, ())


# What was found of a model, and a table of it.

_COLUMNS = "unit", "class", "by", "parameters", "here", "bytes here", "type", "after forward"


@dataclass(frozen=True, slots=True)
class WrappedUnit:
    """A module that is gathered, or reduced, by itself; or all that is not in another.

    Attributes:
        name: Its path in the model; "" for the model itself.
        kind: Its class.
        wrapper: ``"DDP"``, ``"FSDP1"``, ``"FSDP2"``, ``"DeepSpeed ZeRO-2"``; None: bare.
        parameters: Elements of its parameters over all ranks that share them, each counted once,
            those of units inside aside.
        trainable: How many of these require a gradient.
        held: How many of these are on this rank.
        bytes: What this rank's parameters take.
        buffer_bytes: What its buffers take, on this rank.
        dtype: What most of the parameters are kept in: ``"float32"``; "" without parameters.
        compute_dtype: What is computed in, where it is another.
        reduce_dtype: What gradients are reduced in, where it is another.
        reshards: Whether parameters are freed after forward; None: not sharded, or not known.
        mesh: Over which axes: ``"replicate 2 x shard 4"``; "" where there are none.
    """

    name: str
    kind: str
    wrapper: str | None
    parameters: int
    trainable: int
    held: int
    bytes: int
    buffer_bytes: int
    dtype: str
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    reshards: bool | None = None
    mesh: str = ""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What `describe_model` found. ``str()`` is a table of the units.

    Attributes:
        kind: The model's class.
        units: In the order of the model; the first is what is left over.
    """

    kind: str
    units: tuple[WrappedUnit, ...]

    @property
    def wrapper(self) -> str | None:
        """What the model is wrapped by; None: bare."""
        return next((unit.wrapper for unit in self.units if unit.wrapper), None)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, over all ranks that share them."""
        return sum(unit.parameters for unit in self.units)

    @property
    def trainable(self) -> int:
        """Elements of those that require a gradient."""
        return sum(unit.trainable for unit in self.units)

    @property
    def held(self) -> int:
        """Elements of parameters on this rank."""
        return sum(unit.held for unit in self.units)

    @property
    def bytes(self) -> int:
        """Bytes of parameters on this rank, while no unit is gathered."""
        return sum(unit.bytes for unit in self.units)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers on this rank."""
        return sum(unit.buffer_bytes for unit in self.units)

    def __str__(self) -> str:
        rows = [_COLUMNS]
        # Units that differ by name alone are in one row.
        alike = grouped((replace(unit, name=""), unit.name) for unit in self.units)
        for like, names in alike.items():
            name = names[0] or ("(rest)" if len(self.units) > 1 else "(all)")
            dtype = like.dtype or "-"
            dtype += f", computes in {like.compute_dtype}" if like.compute_dtype else ""
            dtype += f", reduces in {like.reduce_dtype}" if like.reduce_dtype else ""
            rows.append((
                name if len(names) == 1 else f"{name} ... {names[-1]} ({len(names)}x)", like.kind,
                f"{like.wrapper or '-'} {like.mesh}".strip(), f"{like.parameters:,}",
                f"{like.held:,}", _bytes(like.bytes), dtype,
                {None: "-", True: "freed", False: "kept"}[like.reshards],
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            for column in (3, 4, 5):
                cells[column] = row[column].rjust(widths[column])
            lines.append("  ".join(cells).rstrip())
        share = f", {self.held / self.parameters:.1%} of it here" if self.parameters else ""
        total = (
            f"{self.kind}: {self.parameters:,} parameters ({self.trainable:,} trainable){share}: "
            f"{_bytes(self.bytes)}, and {_bytes(self.buffer_bytes)} of buffers"
        )
        return "\n".join([total, *lines])


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def describe_model(model: nn.Module) -> ModelDescription:
    """Say what a model is wrapped by, unit by unit, and what this rank holds of it.

    Nothing is sent. The optimizer's state is not counted, nor are gradients.

    Args:
        model: Bare, or wrapped by DDP, FSDP1, FSDP2 or DeepSpeed; compiled or not.

    >>> print(describe_model(nn.Linear(2, 3)))
    Linear: 9 parameters (9 trainable), 100.0% of it here: 36 B, and 0 B of buffers
    unit   class   by  parameters  here  bytes here  type     after forward
    (all)  Linear  -            9     9        36 B  float32  -
    """
    modules = dict(model.named_modules())
    around = next(filter(None, map(_around, modules.values())), None)
    units: dict[str, _Held] = {"": _Held(model)}
    seen: set[torch.Tensor] = set()
    for name, module in modules.items():
        if find_wrapper(module) in ("FSDP1", "FSDP2"):
            parent = units[home_of(name, units)]
            units[name] = _Held(module, find_wrapper(parent.module) != "FSDP2" or not name)
        unit = units[name if name in units else home_of(name, units)]
        unit.parameters += [one for one in module.parameters(recurse=False) if one not in seen]
        unit.buffers += [one for one in module.buffers(recurse=False) if one not in seen]
        seen.update(unit.parameters, unit.buffers)
    found = [_unit(name, held, around) for name, held in units.items()]
    kept = tuple(unit for unit in found if unit.parameters or unit.buffer_bytes or len(found) == 1)
    return ModelDescription(_class_of(model), kept)


describe = describe_model  # its name of old


@dataclass(slots=True)
class _Held:
    """What the innermost unit around it holds, each tensor once."""

    module: nn.Module
    is_outermost: bool = True
    parameters: list[torch.Tensor] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)


def _unit(name: str, held: _Held, around: str | None) -> WrappedUnit:
    module, parameters, buffers = held.module, held.parameters, held.buffers
    wrapper = find_wrapper(module)
    sizes = [(*_sizes(one), one) for one in parameters]
    whole = sum(count for count, _, _ in sizes)
    trainable = sum(count for count, _, one in sizes if one.requires_grad)
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    if wrapper == "FSDP1" and flat is not None:
        # What is registered are views of the shard, and what a rank has nothing of is empty.
        counts = flat._numels  # noqa: SLF001 - no public way to ask
        of_each = flat._params or [flat] * len(counts)  # noqa: SLF001
        counted = [(count, one.requires_grad) for count, one in zip(counts, of_each, strict=True)]
        beside = [one for one in parameters if not hasattr(one, "_fsdp_flattened")]
        counted += [(one.numel(), one.requires_grad) for one in beside]
        whole = sum(count for count, _ in counted)
        trainable = sum(count for count, trains in counted if trains)
    dtypes = Counter(str(one.dtype).removeprefix("torch.") for one in parameters)
    dtype = next((name for name, _ in dtypes.most_common(1)), "")
    mixed, reshards = _policy(module, wrapper, held.is_outermost)
    return WrappedUnit(
        # As the bare model names it.
        name=name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", ""),
        kind=_class_of(module),
        wrapper=wrapper if wrapper in ("FSDP1", "FSDP2") else around,
        parameters=whole, trainable=trainable, held=sum(here for _, here, _ in sizes),
        bytes=sum(here * one.element_size() for _, here, one in sizes),
        buffer_bytes=sum(one.numel() * one.element_size() for one in buffers),
        dtype=dtype, compute_dtype=_other(getattr(mixed, "param_dtype", None), dtype),
        reduce_dtype=_other(getattr(mixed, "reduce_dtype", None), dtype), reshards=reshards,
        mesh=next((_mesh(one) for one in parameters if hasattr(one, "device_mesh")), ""),
    )  # fmt: skip


def _sizes(parameter: Any) -> tuple[int, int]:
    if hasattr(parameter, "device_mesh"):  # DTensor
        return parameter.numel(), parameter.to_local().numel()
    if hasattr(parameter, "ds_numel"):  # DeepSpeed's ZeRO-3
        partition = getattr(parameter, "ds_tensor", None)
        here = parameter.numel() if partition is None else partition.numel()
        return int(parameter.ds_numel), int(here)
    return parameter.numel(), parameter.numel()


def _around(module: nn.Module) -> str | None:
    wrapper = find_wrapper(module)
    if wrapper == "DeepSpeed":
        return f"DeepSpeed ZeRO-{module.zero_optimization_stage()}"  # type: ignore[operator]
    return wrapper if wrapper in ("DDP", "DataParallel") else None


def _policy(module: Any, wrapper: str | None, is_outermost: bool) -> tuple[Any, bool | None]:
    """Return a mixed-precision policy, and whether parameters are freed after forward."""
    if wrapper == "FSDP1":
        strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
        freed = strategy in ("FULL_SHARD", "HYBRID_SHARD") if strategy else None
        return getattr(module, "mixed_precision", None), freed
    if wrapper != "FSDP2":
        return None, None
    state = module._get_fsdp_state()  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None)
    group = groups[0] if groups else getattr(state, "_fsdp_param_group", None)
    policy = getattr(state, "_mp_policy", None)
    if group is None or not hasattr(group, "post_forward_mesh_info"):
        return policy, None
    # torch keeps the outermost where nothing else was asked for: from the first forward pass on.
    kept = is_outermost and getattr(state, "_auto_reshard_after_forward", True)
    return policy, group.post_forward_mesh_info is not None and not kept


def _mesh(parameter: Any) -> str:
    mesh = parameter.device_mesh
    named = zip(mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.shape, strict=True)
    return " x ".join(f"{name} {size}".strip() for name, size in named)


def _class_of(module: Any) -> str:
    """Return the class of a module, or of what it wraps."""
    while True:
        wrapper = find_wrapper(module)
        if wrapper not in (None, "FSDP2"):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod  # noqa: SLF001 - torch.compile's
        else:  # FSDP2 has made a class of its own, FSDPLinear
            return type(module).__mro__[2 if wrapper else 0].__name__


def _other(dtype: torch.dtype | None, than: str) -> str | None:
    name = str(dtype).removeprefix("torch.")
    return None if dtype is None or name == than else name
