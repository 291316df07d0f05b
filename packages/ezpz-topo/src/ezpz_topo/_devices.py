"""Accelerators of this node, counted without torch: by the kernel, a vendor's tool, variables."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ._errors import InvalidVariableError, SchedulerError

# Accelerators: what the kernel or the vendor's tool shows, less what variables hide.

DEVICE_TYPES = ("xpu", "cuda", "mps", "cpu")

_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "nvidia", "ROCR_VISIBLE_DEVICES": "amd", "HIP_VISIBLE_DEVICES": "amd",
    "ZE_AFFINITY_MASK": "intel",
}  # fmt: skip
_DEVICE_TYPE_OF = {"nvidia": "cuda", "amd": "cuda", "intel": "xpu"}


@dataclass(frozen=True, slots=True)
class Accelerators:
    """Devices that ranks of this host can use.

    Attributes:
        device_type: torch's word: ``"cuda"`` (ROCm too), ``"xpu"``, ``"mps"``, or ``"cpu"``
            without any.
        count: Number of devices; 0 for ``"cpu"``, and where they cannot be counted.
        source: The variable, file or rule that the count comes from.
        notes: What was found and ignored, in plain text.
    """

    device_type: str
    count: int
    source: str
    notes: tuple[str, ...] = field(default=(), compare=False)


def get_accelerators(
    env: Mapping[str, str] | None = None, *, root: str = "/", tools: bool = True,
    fallback: tuple[str, int, str] | None = None,
) -> Accelerators:  # fmt: skip
    """Count the devices of this host.

    Args:
        env: The environment to read; default ``os.environ``.
        root: Where ``dev`` and ``sys`` are found; for tests.
        tools: Whether to start nvidia-smi, amd-smi or rocm-smi, where their driver is there
            and no variable decides; False where every rank calls this.
        fallback: (device type, count, source) of a node of this machine, for a host that
            shows nothing, such as a login node; not used where a variable hides devices.

    Raises:
        InvalidVariableError: ``TORCH_DEVICE`` is no device type, a visible-devices list names
            a device twice, or ``ZE_AFFINITY_MASK`` does not parse or fit the hierarchy.
    """
    env = os.environ if env is None else env
    wanted = _read_wanted_type(env)
    if wanted == "cpu":
        return Accelerators("cpu", 0, "TORCH_DEVICE=cpu")
    # Level Zero shows tiles as devices, its default since late 2023 (Intel, "Flattening GPU tile
    # hierarchy"). COMBINED shows the same devices as FLAT, and the driver takes any other word for
    # the default (Intel compute-runtime, execution_environment.cpp).
    flat = env.get("ZE_FLAT_DEVICE_HIERARCHY") != "COMPOSITE"
    unusable: list[Accelerators] = []  # one with a source rules out the fallback
    vendors_here: set[str] = set()
    for found in find_kernel_devices(root, flat=flat):
        if wanted and wanted != found.device_type:
            continue
        counted = found
        if tools and not (found.count and _variables_in_force(found.vendor, env)):
            counted = count_by_vendor_tool(found, env)
        if counted.count != 0:
            vendors_here.add(found.vendor)
        visible = _apply_variables(counted, env, flat)
        if visible.count:
            return visible
        if found.count and counted.count == 0:
            # The tool lists none of those that the kernel shows.
            visible = Accelerators("cpu", 0, counted.source, counted.notes)
        unusable.append(visible)
    unusable += _explain_other_variables(env, vendors_here, wanted)
    return _explain_none(unusable, wanted, fallback)


def _read_wanted_type(env: Mapping[str, str]) -> str:
    """Return the device type of ``TORCH_DEVICE``, which may have an index; empty if not set."""
    wanted = env.get("TORCH_DEVICE", "").partition(":")[0]
    if wanted and wanted not in DEVICE_TYPES:
        raise InvalidVariableError(
            f"TORCH_DEVICE={env['TORCH_DEVICE']!r}; expected one of {', '.join(DEVICE_TYPES)}"
        )
    return wanted


def _explain_none(
    unusable: list[Accelerators], wanted: str, fallback: tuple[str, int, str] | None
) -> Accelerators:
    """Return the answer for a host without a usable device, with the notes of all its results."""
    every_note: dict[str, None] = {}
    for each in unusable:
        every_note.update(dict.fromkeys(each.notes))
    notes = tuple(every_note)
    for each in unusable:
        if each.source:
            return Accelerators("cpu", 0, each.source, notes)
    if fallback is not None and wanted in ("", fallback[0]):
        return Accelerators(*fallback, notes=(*notes, "this host shows no accelerator of its own"))
    if wanted:
        source = f"TORCH_DEVICE={wanted}, and none can be counted here"
        return Accelerators(wanted, 0, source, notes)
    source = "no accelerator found in /dev, /sys or a visible-devices variable"
    return Accelerators("cpu", 0, source, notes)


def _apply_variables(found: KernelDevices, env: Mapping[str, str], flat: bool) -> Accelerators:
    """Return what the variables leave of one vendor's devices, or which one hides them all."""
    names = _variables_in_force(found.vendor, env)
    count = found.count
    source = found.source
    notes = found.notes
    if count == 0 or (count is None and not names):
        # A driver without a device (or without one that can be counted) decides nothing.
        note = f"a driver is there, but no device can be counted: {source}"
        return Accelerators("cpu", 0, "", (*notes, note))
    for name in names:
        if name == "ZE_AFFINITY_MASK":
            visible, more = _count_mask(env[name], count, flat)
        else:
            visible, more = _count_list(name, env[name], count)
        if not visible:
            source = f"{name}={env[name]!r} hides every device"
            if count:
                source += f" of {count}"
            return Accelerators("cpu", 0, source, notes)
        count = visible
        source = f"{name}={env[name]}"
        notes += more
    return Accelerators(found.device_type, count or 0, source, notes)


def _variables_in_force(vendor: str, env: Mapping[str, str]) -> list[str]:
    """Return the set variables that this vendor's runtime reads, in the order it applies them."""
    if vendor == "amd":
        # HIP counts within what ROCR left, and reads CUDA_VISIBLE_DEVICES where its own is not
        # set. GPU_DEVICE_ORDINAL is OpenCL's alone in HIP's source (rocdevice.cpp), though AMD's
        # "GPU isolation" page disagrees; Slurm sets it beside the others.
        names = ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]
        if "HIP_VISIBLE_DEVICES" not in env:
            names = ["ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"]
    elif vendor == "intel" and env.get("ZE_AFFINITY_MASK") in ("", "default"):
        names = []  # the driver takes both for a mask that is not set
    else:
        names = [name for name, owner in _VARIABLES.items() if owner == vendor]
    return [name for name in names if name in env]


def _explain_other_variables(
    env: Mapping[str, str], vendors_here: set[str], wanted: str
) -> list[Accelerators]:
    """Return a result for each variable of a vendor that has no device here."""
    results = []
    for name, vendor in _VARIABLES.items():
        readers = {vendor}
        if name == "CUDA_VISIBLE_DEVICES":
            readers.add("amd")
        text = env.get(name)
        if text is None or readers & vendors_here or wanted not in ("", _DEVICE_TYPE_OF[vendor]):
            continue
        if vendor != "intel" and not _count_list(name, text, None)[0]:
            results.append(Accelerators("cpu", 0, f"{name}={text!r} hides every device"))
        elif text:
            note = f"set aside: {name}={text}, because this host shows no such device"
            results.append(Accelerators("cpu", 0, "", (note,)))
    return results


def _count_list(name: str, text: str, limit: int | None) -> tuple[int, tuple[str, ...]]:
    """Count a list of indices or UUIDs up to the first entry that is no device."""
    # CUDA's programming guide: only the devices before the first invalid index are visible, as
    # with 0,-1,2; Slurm sets NoDevFiles where it gave none, NVIDIA's containers void. HIP and ROCR
    # stop there too. A UUID may be shortened and cannot be checked here.
    devices: list[str] = []
    notes: tuple[str, ...] = ()
    for part in text.split(","):
        entry = part.strip()
        if entry.isascii() and entry.isdigit():
            index = int(entry)
        elif entry.startswith(("GPU-", "MIG-")):
            index = len(devices)
        else:
            break
        if entry in devices:
            # CUDA would show no device at all.
            raise InvalidVariableError(
                f"{name}={text!r} names a device twice; expected each once; "
                f"unset {name}, or list each once"
            )
        if limit is not None and index >= limit and not entry.startswith("MIG-"):
            notes = (f"{name}={text}: stops at {entry!r}, because {limit} devices are here",)
            break
        devices.append(entry)
    if len(devices) > 1 and any(entry.startswith("MIG-") for entry in devices):
        # NVIDIA, MIG user guide, "CUDA Device Enumeration".
        note = (
            f"{name} lists {len(devices)} devices with MIG among them, of which a process may see "
            "only one (before driver R570): counted as 1; give each rank its own"
        )
        return 1, (*notes, note)
    return len(devices), notes


def _count_mask(text: str, limit: int | None, flat: bool) -> tuple[int, tuple[str, ...]]:
    """Count the devices of a ``ZE_AFFINITY_MASK``: its entries are devices of the hierarchy."""
    # Level Zero specification, "Affinity Mask": in FLAT and COMBINED an entry is a tile's index,
    # and 0.1 is not valid (the driver passes it over); in COMPOSITE 0 is a card and 0.1 a card
    # that shows one tile. An index too high is passed over, and one named twice counts once
    # (Intel compute-runtime, execution_environment.cpp).
    form = r"[0-9]{1,9}(\.[0-9]{1,9}){0,2}"
    expected = "cards and their tiles such as 0,1.0"
    if flat:
        form = "[0-9]{1,9}"
        expected = "tile indices such as 0,1,2: ZE_FLAT_DEVICE_HIERARCHY is not COMPOSITE"
    devices = set()
    for part in text.split(","):
        entry = part.strip()
        if not re.fullmatch(form, entry):
            raise InvalidVariableError(
                f"ZE_AFFINITY_MASK={text!r} with {entry!r} in it; expected {expected}; "
                "unset it, or set ZE_FLAT_DEVICE_HIERARCHY to go with it"
            )
        devices.add(int(entry.partition(".")[0]))
    here = {index for index in devices if limit is None or index < limit}
    if here and here != devices:
        note = f"ZE_AFFINITY_MASK={text}: {limit} devices are here, so the others are passed over"
        return len(here), (note,)
    return len(here), ()


# The vendors' own lists of devices: nvidia-smi, amd-smi or rocm-smi. Intel's lists the cards that
# sysfs shows, and not their tiles.

_TIME_LIMIT = 10.0  # seconds; a driver without persistence mode takes some to wake its devices


def count_by_vendor_tool(found: KernelDevices, env: Mapping[str, str]) -> KernelDevices:
    """Return one vendor's devices, as its tool on the ``PATH`` of ``env`` counts them."""
    notes = found.notes
    for argv, pattern, expected in _TOOLS.get(found.vendor, ()):
        text, failures = _run_tool(argv, env)
        notes += failures
        if text is None:
            continue
        command = " ".join(argv)
        gpus = set(re.findall(pattern, text, re.MULTILINE))
        source = command
        if not gpus:
            if found.vendor != "nvidia" or "no devices" not in text.lower():
                notes += (f"{command} said {_find_first_line(text)!r}, not {expected!r}",)
                continue
            source = f"{command} lists no device"
        instances = re.findall(r"^\s*MIG \S+\s+Device\s+[0-9]+:", text, re.MULTILINE)
        if instances:
            mig = f"nvidia-smi lists {len(instances)} MIG devices on {len(gpus)} GPUs, of which one"
            notes += (f"{mig} process sees some: give each rank its own in CUDA_VISIBLE_DEVICES",)
        if found.count not in (None, len(gpus)):
            notes += (f"set aside: {found.source}, because {command} lists {len(gpus)}",)
        return replace(found, count=len(gpus), source=source, notes=notes)
    if notes != found.notes and found.count:
        notes += (f"counted instead: {found.source}",)
    return replace(found, notes=notes)


_TOOLS: dict[str, list[tuple[tuple[str, ...], str, str]]] = {
    # "MIG 1g.10gb Device 3: (UUID: MIG-...)" below its GPU: NVIDIA's MIG user guide, "CUDA Device
    # Enumeration".
    "nvidia": [(("nvidia-smi", "-L"), r"^GPU ([0-9]+): ", "GPU 0: ...")],
    "amd": [
        (("amd-smi", "list"), r"^GPU: ([0-9]+)\s*$", "GPU: 0"),  # AMD SMI's changelog
        # As in outputs published for ROCm 6; a GPU has several lines.
        (("rocm-smi", "--showid"), r"^GPU\[([0-9]+)\]\s*:", "GPU[0] : ..."),
    ],
}
"""Vendor to command, what counts a GPU in its answer, and what is expected there."""


def _run_tool(argv: tuple[str, ...], env: Mapping[str, str]) -> tuple[str | None, tuple[str, ...]]:
    """Return what the tool printed, or None and a note; no note where it is not installed."""
    from ._commands import ask, describe_end, find  # noqa: PLC0415 - 5 ms, only with a driver

    if find(argv[0], env) is None:
        return None, ()
    command = " ".join(argv)
    try:
        # Once: a launch waits for this, and there is another source. Each signal and
        # exit status is an answer, which our note describes.
        answer = ask(
            argv, env={**env, "LC_ALL": "C"}, time_limit=_TIME_LIMIT, attempts=1,
            good=range(-64, 256),
        )  # fmt: skip
    except SchedulerError as error:
        # Its words are about schedulers; the cause is an OSError where it did not start.
        reason = f"no answer in {_TIME_LIMIT:g} s"
        if isinstance(error.__cause__, OSError):
            reason = str(error.__cause__.strerror)
        return None, (f"{command} failed: {reason}",)
    if answer.status:
        message = _find_first_line(f"{answer.stdout}\n{answer.stderr}") or "nothing said"
        return None, (f"{command} failed with {describe_end(answer.status)}: {message}",)
    return answer.stdout, ()


def _find_first_line(text: str) -> str:
    for line in text.splitlines():
        if line.strip():
            return line.strip()[:120]
    return ""


# What the kernel of this host shows of accelerators, in /dev and /sys.


@dataclass(frozen=True, slots=True)
class KernelDevices:
    """Devices of one vendor with a loaded driver; a count of None cannot be known."""

    vendor: str
    device_type: str
    count: int | None
    source: str
    notes: tuple[str, ...] = ()


def find_kernel_devices(root: str = "/", *, flat: bool = True) -> list[KernelDevices]:
    """Return one entry for each vendor with a driver on this host, in order of preference."""
    by_vendor = (_find_nvidia(root), _find_amd(root), _find_intel(root, flat))
    found = [devices for devices in by_vendor if devices is not None]
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        found.append(KernelDevices("apple", "mps", 1, "an Apple silicon Mac"))
    return found


def _find_nvidia(root: str) -> KernelDevices | None:
    names = _listdir(f"{root}/dev")
    count = _count_numbered(names, "nvidia")
    if count or "nvidiactl" in names:
        return KernelDevices("nvidia", "cuda", count, f"{count} x /dev/nvidia<N>")
    if "dxg" in names:
        # Windows' Linux: one file for every GPU of any vendor (Microsoft, "WSL GPU support").
        source = "/dev/dxg (WSL), which does not tell how many"
        return KernelDevices("nvidia", "cuda", None, source)
    return None


def _find_amd(root: str) -> KernelDevices | None:
    if not os.path.exists(f"{root}/dev/kfd"):
        return None
    nodes = f"{root}/sys/class/kfd/kfd/topology/nodes"
    count = 0
    for node in _listdir(nodes):
        # A node without SIMDs is a CPU (Linux, kfd_topology.c). The driver denies reading the
        # properties of a GPU outside this job's cgroup.
        properties = _read_pairs(f"{nodes}/{node}/properties", " ")
        if properties.get("simd_count", "").strip() not in ("", "0"):
            count += 1
    return KernelDevices("amd", "cuda", count, f"{count} GPUs in /sys/class/kfd (ROCm)")


def _find_intel(root: str, flat: bool) -> KernelDevices | None:
    cards = find_intel_cards(root)
    if not cards:
        return None
    where = f"{len(cards)} Intel cards in /sys/class/drm"
    if not flat:
        return KernelDevices("intel", "xpu", len(cards), f"{len(cards)} cards of {where}")
    count = sum(tiles or 1 for _, tiles in cards)
    notes: tuple[str, ...] = ()
    unknown = ", ".join(address for address, tiles in cards if not tiles)
    if unknown:
        notes = (f"sysfs shows no tiles of {unknown}: counted as one device each",)
    return KernelDevices("intel", "xpu", count, f"{count} tiles of {where}", notes)


def find_intel_cards(root: str = "/") -> list[tuple[str, int]]:
    """Return PCI address and tiles (0: not shown) of each discrete Intel GPU that we may open."""
    cards = []
    for name in sorted(_listdir(f"{root}/sys/class/drm")):
        # sysfs shows a container every card of the host; /dev only those it was given.
        if not name.startswith("renderD") or not os.path.exists(f"{root}/dev/dri/{name}"):
            continue
        device = f"{root}/sys/class/drm/{name}/device"
        # The PCI bus writes DRIVER, PCI_CLASS, PCI_ID and PCI_SLOT_NAME (Linux, pci-driver.c).
        facts = _read_pairs(f"{device}/uevent", "=")
        address = facts.get("PCI_SLOT_NAME", "").lower()
        # A display controller of Intel; hexadecimal without leading zeros: 38000 is class 03.
        is_gpu = facts.get("PCI_CLASS", "").zfill(6).startswith("03")
        # The graphics inside a CPU sit at 0000:00:02, as a VGA controller or, where another card
        # drives the screen, as a display controller, which a data-centre card is too.
        if is_gpu and facts.get("PCI_ID", "")[:5] == "8086:" and address[:11] != "0000:00:02.":
            cards.append((address, _count_tiles(device)))
    return cards


def _count_tiles(device: str) -> int:
    """Count a card's tiles: the xe driver has device/tile<N>, i915 has card<N>/gt/gt<N>."""
    # xe: a tile may hold several GTs, so its tiles are counted (Linux, xe_tile.c, "Multi-tile
    # Design"). i915: one GT a tile on discrete cards ("Create a gt/ directory in sysfs", 2022).
    tiles = _count_numbered(_listdir(device), "tile")
    if tiles:
        return tiles
    for name in _listdir(f"{device}/drm"):
        if _count_numbered([name], "card"):
            return _count_numbered(_listdir(f"{device}/drm/{name}/gt"), "gt")
    return 0


def _count_numbered(names: list[str], stem: str) -> int:
    """Count the names that are the stem and a number."""
    count = 0
    for name in names:
        if name.startswith(stem) and name.removeprefix(stem).isdigit():
            count += 1
    return count


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []  # no driver, no directory, or none for us


def _read_pairs(path: str, separator: str) -> dict[str, str]:
    """Return the lines of a file as keys and values."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return dict(line.partition(separator)[::2] for line in file.read().splitlines())
    except OSError:
        return {}  # no such device, or none for us
