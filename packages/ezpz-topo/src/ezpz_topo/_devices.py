"""What this node has: CPUs and accelerators."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ._commands import ask, find
from ._errors import InvalidVariableError, SchedulerError

# CPUs: those this process may use, and those of this node that the job may use.


def get_cpu_count(root: str = "/") -> int:
    """Return the number of logical CPUs that this process may really use, at least 1.

    The smaller of its affinity and its cgroup's quota.

    Args:
        root: Where ``proc`` and ``sys`` are found; for tests.
    """
    return cpu_count_with_source(root)[0]


def cpu_count_with_source(root: str = "/") -> tuple[int, str]:
    """Return `get_cpu_count` and what told it."""
    if hasattr(os, "sched_getaffinity"):
        count, source = len(os.sched_getaffinity(0)), "CPU affinity of this process"
    else:
        count, source = os.cpu_count() or 1, "os.cpu_count()"
    return _within_quota(count, source, root)


def get_cpus_per_node(env: Mapping[str, str] | None = None, *, root: str = "/") -> int:
    """Return the number of logical CPUs of this node that the job may use, at least 1.

    Not this process's affinity: a rank bound to one core is one of many on its node.
    ``SLURM_CPUS_ON_NODE`` in a Slurm job, else every CPU of the node, less what the cgroup's
    cpuset and quota withhold. PBS's ``NCPUS`` is not read: it is the threads of one MPI
    process, ``ompthreads`` where the job asked for them (OpenPBS, start_exec.c).

    Args:
        env: The environment to read; default ``os.environ``.
        root: Where ``proc`` and ``sys`` are found; for tests.

    Raises:
        InvalidVariableError: ``SLURM_CPUS_ON_NODE`` is no whole number from 1.
    """
    return cpus_per_node_with_source(env, root=root)[0]


def cpus_per_node_with_source(
    env: Mapping[str, str] | None = None, *, root: str = "/"
) -> tuple[int, str]:
    """Return `get_cpus_per_node` and what told it.

    Raises:
        InvalidVariableError: As `get_cpus_per_node`.
    """
    env = os.environ if env is None else env
    text = env.get("SLURM_CPUS_ON_NODE", "")
    if text and env.get("SLURM_JOB_ID"):
        if not (text.isascii() and text.isdigit()) or not 0 < len(text) <= 9 or not int(text):
            raise InvalidVariableError(
                f"SLURM_CPUS_ON_NODE={text[:40]!r}; expected a whole number from 1; "
                "unset SLURM_CPUS_ON_NODE, or start inside the Slurm job"
            )
        return _within_quota(int(text), "SLURM_CPUS_ON_NODE", root)
    count, source = os.cpu_count() or 1, "os.cpu_count()"
    for path in _cgroup_files(root, "cpuset", ("cpuset.cpus.effective", "cpuset.cpus")):
        allowed = _cpus_in_set(_read(path))
        if 0 < allowed < count:
            count, source = allowed, f"cgroup cpuset {_shown(path, root)}"
    return _within_quota(count, source, root)


def _within_quota(count: int, source: str, root: str) -> tuple[int, str]:
    found = [(quota, path) for path, quota in _quotas(root)]
    if not found:
        return count, source
    quota, path = min(found)
    if quota >= count:
        return count, source
    return max(1, int(quota)), f"cgroup quota {quota:.4g} CPUs of {_shown(path, root)}"


def _quotas(root: str) -> Iterator[tuple[str, float]]:
    """Yield the quota, in CPUs, of this process's cgroup and of each around it that has one.

    Linux, Documentation/admin-guide/cgroup-v2.rst (``cpu.max``: quota or max, period) and
    Documentation/scheduler/sched-bwc.rst (v1: ``cpu.cfs_quota_us``, -1 for none).
    """
    for path in _cgroup_files(root, "cpu", ("cpu.max", "cpu.cfs_quota_us")):
        words = _read(path).split()
        if path.endswith("cpu.cfs_quota_us"):
            words += _read(f"{os.path.dirname(path)}/cpu.cfs_period_us").split()
        if len(words) == 2 and all(w.isascii() and w.isdigit() and int(w) for w in words):
            yield path, int(words[0]) / int(words[1])


def _cgroup_files(root: str, controller: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yield those files that exist in this process's cgroup and in the cgroups around it.

    A container may see its own cgroup at the mount point while /proc/self/cgroup names the
    host's path below it, so what does not exist is passed over, up to the mount point.
    """
    mount = f"{root.rstrip('/')}/sys/fs/cgroup"
    for line in _read(f"{root.rstrip('/')}/proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            bases = [mount, f"{mount}/unified"]
        elif controller in controllers.split(","):
            bases = [f"{mount}/{controllers}", f"{mount}/{controller}"]
        else:
            continue
        # A path with .. lies outside our cgroup namespace, and so outside the mount.
        parts = [] if ".." in path.split("/") else path.strip("/").split("/")
        for base in bases:
            for depth in range(len(parts), -1, -1):
                directory = "/".join([base, *filter(None, parts[:depth])])
                for name in names:
                    if os.path.isfile(f"{directory}/{name}"):
                        yield f"{directory}/{name}"


def _cpus_in_set(text: str) -> int:
    """Count the CPUs of a list such as ``0-3,8``; 0 where it says nothing that parses."""
    count = 0
    for item in text.strip().split(","):
        low, dash, high = item.partition("-")
        high = high if dash else low
        if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit()):
            return 0
        count += max(0, int(high) - int(low) + 1)
    return count


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        # No cgroups, or none for us: nothing is withheld that we could know of.
        return ""


def _shown(path: str, root: str) -> str:
    return path.removeprefix(root.rstrip("/"))


# Accelerators of this host, counted without torch.

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
    # MERGED  # only a host with a driver pays

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


# The vendors' own lists of devices: nvidia-smi, amd-smi or rocm-smi, xpu-smi.

TIME_LIMIT = 10.0
"""Seconds; a driver without persistence mode takes some to wake its devices."""

_ANY_STATUS = range(-64, 256)
"""Signals and exit statuses: each is an answer, to be told in our words."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a tool said: a number of devices, or None and why not."""

    count: int | None
    source: str = ""
    notes: tuple[str, ...] = ()


def ask_vendor_tool(
    vendor: str,
    env: Mapping[str, str],
    *,
    root: str = "/",
    flat: bool = True,
    time_limit: float = TIME_LIMIT,
) -> Told:
    """Ask the vendor's tool on the ``PATH`` of ``env`` how many devices there are.

    Args:
        vendor: As in `Shown`; a vendor without a tool tells nothing.
        env: The environment that the tool is found and run in.
        root: Where ``dev`` and ``sys`` are found; for tests.
        flat: Whether each Intel tile is a device, as for `shown_devices`.
        time_limit: Seconds until a tool that does not answer is stopped.
    """
    if vendor == "nvidia":
        return _nvidia_smi(env, time_limit)
    if vendor == "amd":
        told = _amd_smi(env, time_limit)
        return told if told.count is not None else _rocm_smi(env, time_limit, told.notes)
    if vendor == "intel":
        return _xpu_smi(env, time_limit, root, flat)
    return Told(None)


def _nvidia_smi(env: Mapping[str, str], time_limit: float) -> Told:
    """Count the lines ``GPU 0: NVIDIA H100 (UUID: GPU-...)`` of ``nvidia-smi -L``.

    The format, with ``MIG 1g.10gb Device 3: (UUID: MIG-...)`` below its GPU, is in NVIDIA's
    MIG user guide, "CUDA Device Enumeration".
    """
    text, note = _output(["nvidia-smi", "-L"], env, time_limit)
    if text is None:
        return Told(None, notes=note)
    gpus = re.findall(r"^GPU [0-9]+: ", text, re.MULTILINE)
    instances = re.findall(r"^\s*MIG \S+\s+Device\s+[0-9]+:", text, re.MULTILINE)
    if not gpus and "no devices" not in text.lower():
        return Told(None, notes=(f"nvidia-smi -L said {_first_line(text)!r}, not 'GPU 0: ...'",))
    mig = (
        f"nvidia-smi lists {len(instances)} MIG devices on {len(gpus)} GPUs, of which one "
        "process sees some: give each rank its own in CUDA_VISIBLE_DEVICES"
    )
    return Told(len(gpus), "nvidia-smi -L", (mig,) if instances else ())


def _amd_smi(env: Mapping[str, str], time_limit: float) -> Told:
    """Count the lines ``GPU: 0`` of ``amd-smi list`` (AMD SMI's changelog)."""
    text, note = _output(["amd-smi", "list"], env, time_limit)
    if text is None:
        return Told(None, notes=note)
    gpus = set(re.findall(r"^GPU: ([0-9]+)\s*$", text, re.MULTILINE))
    if not gpus:
        return Told(None, notes=(f"amd-smi list said {_first_line(text)!r}, not 'GPU: 0'",))
    return Told(len(gpus), "amd-smi list")


def _rocm_smi(env: Mapping[str, str], time_limit: float, before: tuple[str, ...]) -> Told:
    """Count the GPUs of ``GPU[0] : Device ID: 0x74a1`` in ``rocm-smi --showid``.

    The format is that of outputs published for ROCm 6; a GPU has several lines.
    """
    text, note = _output(["rocm-smi", "--showid"], env, time_limit)
    if text is None:
        return Told(None, notes=before + note)
    gpus = set(re.findall(r"^GPU\[([0-9]+)\]\s*:", text, re.MULTILINE))
    if not gpus:
        note = (f"rocm-smi --showid said {_first_line(text)!r}, not 'GPU[0] : ...'",)
        return Told(None, notes=before + note)
    return Told(len(gpus), "rocm-smi --showid", before)


def _xpu_smi(env: Mapping[str, str], time_limit: float, root: str, flat: bool) -> Told:
    """Take the physical cards of ``xpu-smi discovery -j``, and their tiles from sysfs.

    ``device_list`` holds an object a card with ``device_function_type`` and
    ``pci_bdf_address``, and is null where there is none (Intel XPU Manager, CLI user guide
    and cmd_discovery.cpp). It lists cards in every ZE_FLAT_DEVICE_HIERARCHY (Level Zero
    specification, "Device Hierarchy": SYSMAN is not affected).
    """
    text, note = _output(["xpu-smi", "discovery", "-j"], env, time_limit)
    if text is None:
        return Told(None, notes=note)
    import json  # noqa: PLC0415

    try:
        answer = json.loads(text)
        listed = answer["device_list"] or []
        addresses = {
            entry["pci_bdf_address"].lower()
            for entry in listed
            if entry["device_function_type"] == "physical"
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        said = _first_line(text)
        return Told(None, notes=(f"xpu-smi discovery -j said {said!r}, not a device_list",))
    cards = [card for card in intel_cards(root) if card[0] in addresses]
    if listed and not cards:
        return Told(None, notes=("xpu-smi discovery -j lists no card that sysfs shows",))
    count, notes = devices_of_cards(cards, flat=flat)
    unit = "tiles" if flat else "cards"
    return Told(count, f"xpu-smi discovery: {count} {unit} of {len(cards)} cards", notes)


def _output(
    argv: list[str], env: Mapping[str, str], time_limit: float
) -> tuple[str | None, tuple[str, ...]]:
    """Return what the tool printed, or None and a note; no note where it is not installed."""
    if find(argv[0], env) is None:
        return None, ()
    called = " ".join(argv)
    try:
        # Once: this stands in the way of a launch, and there is another source.
        answer = ask(
            argv, env={**env, "LC_ALL": "C"}, time_limit=time_limit, attempts=1, good=_ANY_STATUS
        )
    except SchedulerError as error:
        # Its words are about schedulers; the cause is an OSError where it did not start.
        cause = error.__cause__
        why = cause.strerror if isinstance(cause, OSError) else f"no answer in {time_limit:g} s"
        return None, (f"{called} failed: {why}",)
    if answer.status:
        said = _first_line(f"{answer.stdout}\n{answer.stderr}") or "nothing said"
        how = f"exit status {answer.status}" if answer.status > 0 else f"signal {-answer.status}"
        return None, (f"{called} failed with {how}: {said}",)
    return answer.stdout, ()


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:120] if lines else ""


# What the kernel of this host shows of accelerators, in /dev and /sys.

_CLASS_DISPLAY = "3"
_VENDOR_INTEL = "8086"


@dataclass(frozen=True, slots=True, eq=False)  # nobody compares them, and to make eq takes 0.3 ms
class Shown:
    """Devices of one vendor as the kernel shows them.

    Attributes:
        vendor: ``"nvidia"``, ``"amd"``, ``"intel"`` or ``"apple"``.
        device_type: torch's word for them.
        count: Number of devices, or None where a driver is there and cannot be counted.
        source: The files that told.
        notes: What was assumed, in words for people.
    """

    vendor: str
    device_type: str
    count: int | None
    source: str
    notes: tuple[str, ...] = ()


Card = tuple[str, int]
"""One Intel card: its PCI address, and its tiles, 0 where sysfs does not show them."""


def shown_devices(root: str = "/", *, flat: bool = True) -> list[Shown]:
    """Return one entry for each vendor whose driver this host shows, in order of preference.

    Args:
        root: Where ``dev`` and ``sys`` are found; for tests.
        flat: Whether Level Zero shows each Intel tile as a device (``FLAT``) or each card.
    """
    found = (_nvidia(root), _amd(root), _intel(root, flat), _apple())
    return [shown for shown in found if shown is not None]


def devices_of_cards(cards: list[Card], *, flat: bool) -> tuple[int, tuple[str, ...]]:
    """Return the number of Level Zero devices that these cards are, and notes on it."""
    if not flat:
        return len(cards), ()
    unknown = [address for address, tiles in cards if not tiles]
    note = f"sysfs shows no tiles of {', '.join(unknown)}: counted as one device each"
    return sum(tiles or 1 for _, tiles in cards), (note,) if unknown else ()


def intel_cards(root: str = "/") -> list[Card]:
    """Return the discrete Intel GPUs that this host lets us open a render node of.

    The graphics inside a CPU are left out: they sit at PCI 0000:00:02, as a VGA controller
    or, where another card drives the screen, as a display controller. So the PCI class alone
    does not tell them from a data-centre card, which is a display controller (0x0380) too.
    """
    cards = []
    for name in sorted(_listdir(f"{root}/sys/class/drm")):
        # sysfs shows a container every card of the host; /dev only those it was given.
        if not name.startswith("renderD") or not os.path.exists(f"{root}/dev/dri/{name}"):
            continue
        device = f"{root}/sys/class/drm/{name}/device"
        # The PCI bus writes DRIVER, PCI_CLASS, PCI_ID and PCI_SLOT_NAME (Linux, pci-driver.c).
        facts = dict(line.partition("=")[::2] for line in _lines(f"{device}/uevent"))
        vendor = facts.get("PCI_ID", "").partition(":")[0]
        address = facts.get("PCI_SLOT_NAME", "")
        # PCI_CLASS is hexadecimal without leading zeros: 38000 is class 03, subclass 80.
        pci_class = facts.get("PCI_CLASS", "").zfill(6)[:2].lstrip("0")
        if vendor != _VENDOR_INTEL or pci_class != _CLASS_DISPLAY:
            continue
        if not address.startswith("0000:00:02."):
            cards.append((address.lower(), _tiles(device)))
    return cards


def _tiles(device: str) -> int:
    """Count tiles: the xe driver has device/tile<N>, i915 has card<N>/gt/gt<N>.

    xe: a tile may hold several GTs, so its tiles are counted (Linux, xe_tile.c, "Multi-tile
    Design"). i915: one GT a tile on discrete cards ("Create a gt/ directory in sysfs", 2022).
    """
    tiles = sum(_numbered(name, "tile") for name in _listdir(device))
    if tiles:
        return tiles
    for name in _listdir(f"{device}/drm"):
        if _numbered(name, "card"):
            return sum(_numbered(gt, "gt") for gt in _listdir(f"{device}/drm/{name}/gt"))
    return 0


def _nvidia(root: str) -> Shown | None:
    names = _listdir(f"{root}/dev")
    count = sum(_numbered(name, "nvidia") for name in names)
    if count or "nvidiactl" in names:
        return Shown("nvidia", "cuda", count, f"{count} x /dev/nvidia<N>")
    if "dxg" in names:
        # Windows' Linux: one file for every GPU of any vendor (Microsoft, "WSL GPU support").
        return Shown("nvidia", "cuda", None, "/dev/dxg (WSL), which does not tell how many")
    return None


def _amd(root: str) -> Shown | None:
    """Count KFD nodes with SIMDs: a node without is a CPU (Linux kernel, kfd_topology.c)."""
    if not os.path.exists(f"{root}/dev/kfd"):
        return None
    nodes = f"{root}/sys/class/kfd/kfd/topology/nodes"
    count = 0
    for node in _listdir(nodes):
        # The driver denies reading the properties of a GPU outside this job's cgroup.
        facts = dict(line.partition(" ")[::2] for line in _lines(f"{nodes}/{node}/properties"))
        count += facts.get("simd_count", "0").strip() not in ("", "0")
    return Shown("amd", "cuda", count, f"{count} GPUs in /sys/class/kfd (ROCm)")


def _intel(root: str, flat: bool) -> Shown | None:
    cards = intel_cards(root)
    if not cards:
        return None
    count, notes = devices_of_cards(cards, flat=flat)
    unit = "tiles" if flat else "cards"
    source = f"{count} {unit} of {len(cards)} Intel cards in /sys/class/drm"
    return Shown("intel", "xpu", count, source, notes)


def _apple() -> Shown | None:
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return Shown("apple", "mps", 1, "an Apple silicon Mac")
    return None


def _numbered(name: str, stem: str) -> bool:
    return name.startswith(stem) and name[len(stem) :].isdigit()


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        # No driver, no directory (or none for us): there is nothing to use.
        return []


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []
