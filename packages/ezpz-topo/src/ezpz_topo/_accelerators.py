"""Accelerators of this host, counted without torch.

The order of trust: ``TORCH_DEVICE``; visible-device variables; the vendors' tools; /dev and
/sys; what the caller knows of the machine. A variable can only hide devices, so it is cut to
what the host has: ``CUDA_VISIBLE_DEVICES=0`` left over on a host without a GPU gives none, and
``0,1,2,3`` where two are gives two, as CUDA itself stops at the first index that it has not.
Whatever is set aside is said in the notes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ._devices import Shown, shown_devices
from ._errors import InvalidVariableError

DEVICE_TYPES = ("xpu", "cuda", "mps", "cpu")

_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "nvidia",
    "ROCR_VISIBLE_DEVICES": "amd",
    "HIP_VISIBLE_DEVICES": "amd",
    "ZE_AFFINITY_MASK": "intel",
}
_DEVICE_TYPE_OF = {"nvidia": "cuda", "amd": "cuda", "intel": "xpu"}
_MASK_ENTRY = r"[0-9]{1,9}(\.[0-9]{1,9}){0,2}"


@dataclass(frozen=True, slots=True)
class Accelerators:
    """Devices that ranks of this host can use.

    Attributes:
        device_type: torch's word: ``"cuda"`` (ROCm too), ``"xpu"``, ``"mps"``, or ``"cpu"``
            where there is none.
        count: Number of devices; 0 for ``"cpu"``, and where they cannot be counted.
        source: The variable, file or rule that told.
        notes: What was seen and set aside, in words for people.
    """

    device_type: str
    count: int
    source: str
    notes: tuple[str, ...] = field(default=(), compare=False)


def get_accelerators(
    env: Mapping[str, str] | None = None,
    *,
    root: str = "/",
    tools: bool = True,
    fallback: tuple[str, int, str] | None = None,
) -> Accelerators:
    """Count the devices of this host.

    Args:
        env: The environment to read; default ``os.environ``.
        root: Where ``dev`` and ``sys`` are found; for tests.
        tools: Whether to start nvidia-smi, amd-smi, rocm-smi or xpu-smi, where their driver
            is there and no variable tells; False where every rank calls this.
        fallback: (device type, count, source) of a node of this machine, for a host that
            shows nothing, such as a login node; not used where a variable hides devices.

    Raises:
        InvalidVariableError: ``TORCH_DEVICE`` is no device type, a visible-devices list names
            a device twice, or ``ZE_AFFINITY_MASK`` does not parse or fit the hierarchy.
    """
    env = os.environ if env is None else env
    asked = _asked(env)
    if asked == "cpu":
        return Accelerators("cpu", 0, "TORCH_DEVICE=cpu")
    flat = _is_flat(env)
    hosts = shown_devices(root, flat=flat)
    if not os.path.isdir(f"{root}/dev"):
        # Windows: with nothing to compare them with, the variables are all there is.
        vendors = dict.fromkeys(v for name, v in _VARIABLES.items() if name in env)
        hosts += [Shown(vendor, _DEVICE_TYPE_OF[vendor], None, "") for vendor in vendors]
        tools = False
    none, usable = [], set()
    for host in hosts:
        if asked not in ("", host.device_type):
            continue
        counted = _counted(host, env, root, flat, tools)
        if counted.count != 0:
            usable.add(host.vendor)
        found = _usable(counted, env, flat, denied=bool(host.count) and counted.count == 0)
        if found.count:
            return found
        none.append(found)
    none += _leftovers(env, usable, asked)
    notes = tuple(dict.fromkeys(note for each in none for note in each.notes))
    told = next((each.source for each in none if each.source), "")
    if told:
        return Accelerators("cpu", 0, told, notes)
    if fallback is not None and asked in ("", fallback[0]):
        return Accelerators(*fallback, notes=(*notes, "this host shows no accelerator of its own"))
    if asked:
        return Accelerators(asked, 0, f"TORCH_DEVICE={asked}, and none can be counted here", notes)
    nothing = "no accelerator found in /dev, /sys or a visible-devices variable"
    return Accelerators("cpu", 0, nothing, notes)


def _asked(env: Mapping[str, str]) -> str:
    asked = env.get("TORCH_DEVICE", "").partition(":")[0]
    if asked and asked not in DEVICE_TYPES:
        raise InvalidVariableError(
            f"TORCH_DEVICE={env['TORCH_DEVICE']!r}; expected one of {', '.join(DEVICE_TYPES)}"
        )
    return asked


def _counted(host: Shown, env: Mapping[str, str], root: str, flat: bool, tools: bool) -> Shown:
    """Return what the host has of one vendor, by its tool where no variable will tell."""
    if not tools or (host.count and _names_in_force(host.vendor, env)):
        return host
    from ._vendor_tools import ask_vendor_tool  # noqa: PLC0415  # only a host with a driver pays

    told = ask_vendor_tool(host.vendor, env, root=root, flat=flat)
    notes = host.notes + told.notes
    if told.count is None:
        seen = (f"counted instead: {host.source}",) if told.notes and host.count else ()
        return replace(host, notes=notes + seen)
    if host.count is not None and told.count != host.count:
        notes += (f"set aside: {host.source}, because {told.source} lists {told.count}",)
    source = told.source if told.count else f"{told.source} lists no device"
    return replace(host, count=told.count, source=source, notes=notes)


def _usable(host: Shown, env: Mapping[str, str], flat: bool, *, denied: bool) -> Accelerators:
    """Return what the variables leave of one vendor's devices.

    Of none, the source is what hides them (or ``denied``, the tool that lists none of those
    that the kernel shows), or empty where there was nothing to hide.
    """
    names = _names_in_force(host.vendor, env)
    if denied:
        return Accelerators("cpu", 0, host.source, host.notes)
    if host.count == 0 or (host.count is None and not names):
        # A driver without a device (or without one that can be counted) tells nothing.
        note = f"a driver is there, but no device can be counted: {host.source}"
        return Accelerators("cpu", 0, "", (*host.notes, note) if host.source else host.notes)
    count, source, notes = host.count, host.source, host.notes
    for name in names:
        visible, more = _visible(name, env[name], count, flat)
        if not visible:
            of = f" of {count}" if count else ""
            return Accelerators("cpu", 0, f"{name}={env[name]!r} hides every device{of}", notes)
        count, source, notes = visible, f"{name}={env[name]}", notes + more
    return Accelerators(host.device_type, count or 0, source, notes)


def _names_in_force(vendor: str, env: Mapping[str, str]) -> list[str]:
    """Return the set variables that this vendor's runtime reads, in the order it applies them.

    HIP counts within what ROCR left, and reads ``CUDA_VISIBLE_DEVICES`` where its own is not
    set. ``GPU_DEVICE_ORDINAL`` is OpenCL's alone in HIP's source (rocdevice.cpp), though
    AMD's "GPU isolation" page says otherwise; Slurm sets it beside the others.
    """
    if vendor == "amd":
        hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in env else "CUDA_VISIBLE_DEVICES"
        return [name for name in ("ROCR_VISIBLE_DEVICES", hip) if name in env]
    if vendor == "intel" and env.get("ZE_AFFINITY_MASK") in ("", "default"):
        return []  # the driver takes both for a mask that is not set
    return [name for name, of in _VARIABLES.items() if of == vendor and name in env]


def _leftovers(env: Mapping[str, str], usable: set[str], asked: str) -> list[Accelerators]:
    """Return what is to be said of the variables of vendors that have no device here.

    One that hides devices says so, and so rules out a fallback; another is only noted.
    """
    said = []
    for name, vendor in _VARIABLES.items():
        readers = {vendor, "amd"} if name == "CUDA_VISIBLE_DEVICES" else {vendor}
        text = env.get(name)
        if text is None or readers & usable or asked not in ("", _DEVICE_TYPE_OF[vendor]):
            continue
        if vendor != "intel" and not _listed(name, text, None)[0]:
            said.append(Accelerators("cpu", 0, f"{name}={text!r} hides every device"))
        elif text:
            note = f"set aside: {name}={text}, because this host shows no such device"
            said.append(Accelerators("cpu", 0, "", (note,)))
    return said


def _visible(name: str, text: str, limit: int | None, flat: bool) -> tuple[int, tuple[str, ...]]:
    """Return how many of ``limit`` devices a variable shows, and notes on what it cannot."""
    if name == "ZE_AFFINITY_MASK":
        return _masked(text, limit, flat)
    return _listed(name, text, limit)


def _listed(name: str, text: str, limit: int | None) -> tuple[int, tuple[str, ...]]:
    """Count a list of indices or UUIDs up to the first entry that is no device.

    CUDA's programming guide: only the devices before the first invalid index are visible,
    as with ``0,-1,2``; Slurm says ``NoDevFiles`` where it gave none, NVIDIA's containers
    ``void``. HIP and ROCR stop there too. A UUID may be shortened and cannot be checked here.
    """
    good: list[str] = []
    notes: tuple[str, ...] = ()
    for entry in (entry.strip() for entry in text.split(",")):
        index = int(entry) if entry.isascii() and entry.isdigit() else None
        if index is None and not entry.startswith(("GPU-", "MIG-")):
            break
        if entry in good:
            # CUDA would show no device at all.
            raise InvalidVariableError(
                f"{name}={text!r} names a device twice; expected each once; "
                f"unset {name}, or list each once"
            )
        too_many = limit is not None and limit <= (len(good) if index is None else index)
        if too_many and not entry.startswith("MIG-"):
            notes = (f"{name}={text}: stops at {entry!r}, because {limit} devices are here",)
            break
        good.append(entry)
    if len(good) > 1 and any(entry.startswith("MIG-") for entry in good):
        # NVIDIA, MIG user guide, "CUDA Device Enumeration".
        note = (
            f"{name} lists {len(good)} devices with MIG among them, of which a process may see "
            "only one (before driver R570): counted as 1; give each rank its own"
        )
        return 1, (*notes, note)
    return len(good), notes


def _is_flat(env: Mapping[str, str]) -> bool:
    """Return whether Level Zero shows tiles as devices, its default on cards that have several.

    That is so since late 2023 (Intel, "Flattening GPU tile hierarchy"); other cards are one
    tile each. ``COMBINED`` shows the same devices as ``FLAT``, and the driver takes any other
    word for the default (Intel compute-runtime, execution_environment.cpp).
    """
    return env.get("ZE_FLAT_DEVICE_HIERARCHY") != "COMPOSITE"


def _masked(text: str, limit: int | None, flat: bool) -> tuple[int, tuple[str, ...]]:
    """Count the devices of a ``ZE_AFFINITY_MASK``, whose entries are devices of the hierarchy.

    Level Zero specification, "Affinity Mask": in ``FLAT`` and ``COMBINED`` an entry is a
    tile's index, and ``0.1`` is not valid (the driver passes it over); in ``COMPOSITE`` ``0``
    is a card and ``0.1`` a card that shows one tile. An index too high is passed over, and
    one named twice counts once (Intel compute-runtime, execution_environment.cpp).
    """
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not re.fullmatch(_MASK_ENTRY, entry) or (flat and "." in entry):
            expected = (
                "tile indices such as 0,1,2: ZE_FLAT_DEVICE_HIERARCHY is not COMPOSITE"
                if flat
                else "cards and their tiles such as 0,1.0"
            )
            raise InvalidVariableError(
                f"ZE_AFFINITY_MASK={text!r} with {entry!r} in it; expected {expected}; "
                "unset it, or set ZE_FLAT_DEVICE_HIERARCHY to go with it"
            )
    devices = {int(entry.partition(".")[0]) for entry in entries}
    here = {index for index in devices if limit is None or index < limit}
    if here != devices and here:
        note = f"ZE_AFFINITY_MASK={text}: {limit} devices are here, so the others are passed over"
        return len(here), (note,)
    return len(here), ()
