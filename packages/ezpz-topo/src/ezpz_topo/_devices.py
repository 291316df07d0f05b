"""What this node has: CPUs and accelerators, counted without torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ._errors import InvalidVariableError, SchedulerError

# CPUs and memory: what this process may use, and what of this node the job may use.


def get_cpu_count(root: str = "/") -> int:
    """Return the number of logical CPUs that this process may really use, at least 1.

    The smaller of its affinity and its cgroup's quota.

    Args:
        root: Where ``proc`` and ``sys`` are found; for tests.
    """
    return cpu_count_with_source(root)[0]


def cpu_count_with_source(root: str = "/") -> tuple[int, str]:
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
    process, ``ompthreads`` where the job requested them (OpenPBS, start_exec.c).

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
    env = os.environ if env is None else env
    text = env.get("SLURM_CPUS_ON_NODE", "")
    if text and env.get("SLURM_JOB_ID"):
        if not re.fullmatch("[0-9]{1,9}", text) or not int(text):
            raise InvalidVariableError(
                f"SLURM_CPUS_ON_NODE={text[:40]!r}; expected a whole number from 1; "
                "unset SLURM_CPUS_ON_NODE, or start inside the Slurm job"
            )
        return _within_quota(int(text), "SLURM_CPUS_ON_NODE", root)
    count, source = os.cpu_count() or 1, "os.cpu_count()"
    for path in _cgroup_files(root, "cpuset", ("cpuset.cpus.effective", "cpuset.cpus")):
        allowed = len(cores_of(_read(path).strip()))
        if 0 < allowed < count:
            count, source = allowed, f"cgroup cpuset {path.removeprefix(root.rstrip('/'))}"
    return _within_quota(count, source, root)


def _within_quota(count: int, source: str, root: str) -> tuple[int, str]:
    """Return the count, or the quota of this process's cgroup or one around it that is less."""
    # Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max: quota or max, period) and
    # Documentation/scheduler/sched-bwc.rst (v1: cpu.cfs_quota_us, -1 for none).
    least = float(count)
    for path in _cgroup_files(root, "cpu", ("cpu.max", "cpu.cfs_quota_us")):
        words = _read(path).split()
        if path.endswith("cpu.cfs_quota_us"):
            words += _read(f"{os.path.dirname(path)}/cpu.cfs_period_us").split()
        if len(words) == 2 and all(re.fullmatch("[0-9]+", w) and int(w) for w in words):
            quota = int(words[0]) / int(words[1])
            if quota < least:
                shown = path.removeprefix(root.rstrip("/"))
                least, source = quota, f"cgroup quota {quota:.4g} CPUs of {shown}"
    return max(1, int(least)), source


def get_memory_limit(root: str = "/") -> int | None:
    """Return the bytes that this process's cgroup, or one around it, allows; None for no limit.

    Args:
        root: Where ``proc`` and ``sys`` are found; for tests.
    """
    files = _cgroup_files(root, "memory", ("memory.max", "memory.limit_in_bytes"))
    limits = (_read(path).strip() for path in files)
    return min((int(limit) for limit in limits if limit.isdecimal()), default=None)


def _cgroup_files(root: str, controller: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yield those files that exist in this process's cgroup and in the cgroups around it."""
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
        # A path with .. lies outside our cgroup namespace, and so outside the mount. A container
        # may see its own cgroup at the mount point while the path is the host's: what does not
        # exist is passed over.
        parts = [] if ".." in path.split("/") else path.strip("/").split("/")
        for base in bases:
            for depth in range(len(parts), -1, -1):
                directory = "/".join([base, *filter(None, parts[:depth])])
                for name in names:
                    if os.path.isfile(f"{directory}/{name}"):
                        yield f"{directory}/{name}"


def cores_of(text: str) -> set[int]:
    """Return the cores of ``0-7,104-111``; none where it does not parse."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch("(0|[1-9][0-9]{0,4})(?:-(0|[1-9][0-9]{0,4}))?", part)
        span = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not span or not cores.isdisjoint(span):
            return set()
        cores.update(span)
    return cores


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""  # no such thing here, or none for us


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
    env: Mapping[str, str] | None = None, *, root: str = "/", tools: bool = True,
    fallback: tuple[str, int, str] | None = None,
) -> Accelerators:  # fmt: skip
    """Count the devices of this host.

    Args:
        env: The environment to read; default ``os.environ``.
        root: Where ``dev`` and ``sys`` are found; for tests.
        tools: Whether to start nvidia-smi, amd-smi or rocm-smi, where their driver is there
            and no variable tells; False where every rank calls this.
        fallback: (device type, count, source) of a node of this machine, for a host that
            shows nothing, such as a login node; not used where a variable hides devices.

    Raises:
        InvalidVariableError: ``TORCH_DEVICE`` is no device type, a visible-devices list names
            a device twice, or ``ZE_AFFINITY_MASK`` does not parse or fit the hierarchy.
    """
    env = os.environ if env is None else env
    wanted = env.get("TORCH_DEVICE", "").partition(":")[0]
    if wanted and wanted not in DEVICE_TYPES:
        raise InvalidVariableError(
            f"TORCH_DEVICE={env['TORCH_DEVICE']!r}; expected one of {', '.join(DEVICE_TYPES)}"
        )
    if wanted == "cpu":
        return Accelerators("cpu", 0, "TORCH_DEVICE=cpu")
    # Level Zero shows tiles as devices, its default since late 2023 (Intel, "Flattening GPU tile
    # hierarchy"). COMBINED shows the same devices as FLAT, and the driver takes any other word for
    # the default (Intel compute-runtime, execution_environment.cpp).
    flat = env.get("ZE_FLAT_DEVICE_HIERARCHY") != "COMPOSITE"
    none, usable = [], set()
    for host in shown_devices(root, flat=flat):
        if wanted not in ("", host.device_type):
            continue
        is_told = bool(host.count) and bool(_names_in_force(host.vendor, env))
        counted = ask_vendor_tool(host, env) if tools and not is_told else host
        if counted.count != 0:
            usable.add(host.vendor)
        found = _visible(counted, env, flat, denied=bool(host.count) and counted.count == 0)
        if found.count:
            return found
        none.append(found)
    none += _leftovers(env, usable, wanted)
    notes = tuple(dict.fromkeys(note for each in none for note in each.notes))
    if told := next((each.source for each in none if each.source), ""):
        return Accelerators("cpu", 0, told, notes)
    if fallback is not None and wanted in ("", fallback[0]):
        return Accelerators(*fallback, notes=(*notes, "this host shows no accelerator of its own"))
    why = "no accelerator found in /dev, /sys or a visible-devices variable"
    if wanted:
        why = f"TORCH_DEVICE={wanted}, and none can be counted here"
    return Accelerators(wanted or "cpu", 0, why, notes)


def _visible(host: Shown, env: Mapping[str, str], flat: bool, *, denied: bool) -> Accelerators:
    """Return what the variables leave of one vendor's devices; of none, what hides them."""
    names = _names_in_force(host.vendor, env)
    if denied:  # the tool lists none of those that the kernel shows
        return Accelerators("cpu", 0, host.source, host.notes)
    if host.count == 0 or (host.count is None and not names):
        # A driver without a device (or without one that can be counted) tells nothing.
        note = f"a driver is there, but no device can be counted: {host.source}"
        return Accelerators("cpu", 0, "", (*host.notes, note))
    count, source, notes = host.count, host.source, host.notes
    for name in names:
        if name == "ZE_AFFINITY_MASK":
            visible, more = _masked(env[name], count, flat)
        else:
            visible, more = _listed(name, env[name], count)
        if not visible:
            of = f" of {count}" if count else ""
            return Accelerators("cpu", 0, f"{name}={env[name]!r} hides every device{of}", notes)
        count, source, notes = visible, f"{name}={env[name]}", notes + more
    return Accelerators(host.device_type, count or 0, source, notes)


def _names_in_force(vendor: str, env: Mapping[str, str]) -> list[str]:
    """Return the set variables that this vendor's runtime reads, in the order it applies them."""
    if vendor == "amd":
        # HIP counts within what ROCR left, and reads CUDA_VISIBLE_DEVICES where its own is not
        # set. GPU_DEVICE_ORDINAL is OpenCL's alone in HIP's source (rocdevice.cpp), though AMD's
        # "GPU isolation" page says otherwise; Slurm sets it beside the others.
        hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in env else "CUDA_VISIBLE_DEVICES"
        return [name for name in ("ROCR_VISIBLE_DEVICES", hip) if name in env]
    if vendor == "intel" and env.get("ZE_AFFINITY_MASK") in ("", "default"):
        return []  # the driver takes both for a mask that is not set
    return [name for name, of in _VARIABLES.items() if of == vendor and name in env]


def _leftovers(env: Mapping[str, str], usable: set[str], wanted: str) -> list[Accelerators]:
    """Return what is to be said of the variables of vendors that have no device here."""
    said = []
    for name, vendor in _VARIABLES.items():
        readers = {vendor, "amd"} if name == "CUDA_VISIBLE_DEVICES" else {vendor}
        text = env.get(name)
        if text is None or readers & usable or wanted not in ("", _DEVICE_TYPE_OF[vendor]):
            continue
        if vendor != "intel" and not _listed(name, text, None)[0]:
            # With a source: it rules out the fallback.
            said.append(Accelerators("cpu", 0, f"{name}={text!r} hides every device"))
        elif text:
            note = f"set aside: {name}={text}, because this host shows no such device"
            said.append(Accelerators("cpu", 0, "", (note,)))
    return said


def _listed(name: str, text: str, limit: int | None) -> tuple[int, tuple[str, ...]]:
    """Count a list of indices or UUIDs up to the first entry that is no device."""
    # CUDA's programming guide: only the devices before the first invalid index are visible, as
    # with 0,-1,2; Slurm says NoDevFiles where it gave none, NVIDIA's containers void. HIP and ROCR
    # stop there too. A UUID may be shortened and cannot be checked here.
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


def _masked(text: str, limit: int | None, flat: bool) -> tuple[int, tuple[str, ...]]:
    """Count the devices of a ``ZE_AFFINITY_MASK``, whose entries are devices of the hierarchy."""
    # Level Zero specification, "Affinity Mask": in FLAT and COMBINED an entry is a tile's index,
    # and 0.1 is not valid (the driver passes it over); in COMPOSITE 0 is a card and 0.1 a card
    # that shows one tile. An index too high is passed over, and one named twice counts once
    # (Intel compute-runtime, execution_environment.cpp).
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9}){0,2}", entry) or (flat and "." in entry):
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


# The vendors' own lists of devices: nvidia-smi, amd-smi or rocm-smi. Intel's lists the cards that
# sysfs shows, and not their tiles.

_TIME_LIMIT = 10.0  # seconds; a driver without persistence mode takes some to wake its devices


def ask_vendor_tool(host: Shown, env: Mapping[str, str]) -> Shown:
    """Return what the host has of one vendor, as its tool on the ``PATH`` of ``env`` counts it."""
    notes = host.notes
    for argv, pattern, expected in _TOOLS.get(host.vendor, ()):
        text, failed = _output(argv, env)
        notes += failed
        if text is None:
            continue
        called, gpus = " ".join(argv), set(re.findall(pattern, text, re.MULTILINE))
        if not gpus and not (host.vendor == "nvidia" and "no devices" in text.lower()):
            notes += (f"{called} said {_first_line(text)!r}, not {expected!r}",)
            continue
        instances = re.findall(r"^\s*MIG \S+\s+Device\s+[0-9]+:", text, re.MULTILINE)
        if instances:
            mig = f"nvidia-smi lists {len(instances)} MIG devices on {len(gpus)} GPUs, of which one"
            notes += (f"{mig} process sees some: give each rank its own in CUDA_VISIBLE_DEVICES",)
        if host.count not in (None, len(gpus)):
            notes += (f"set aside: {host.source}, because {called} lists {len(gpus)}",)
        source = called if gpus else f"{called} lists no device"
        return replace(host, count=len(gpus), source=source, notes=notes)
    if notes != host.notes and host.count:
        notes += (f"counted instead: {host.source}",)
    return replace(host, notes=notes)


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


def _output(argv: tuple[str, ...], env: Mapping[str, str]) -> tuple[str | None, tuple[str, ...]]:
    """Return what the tool printed, or None and a note; no note where it is not installed."""
    from ._commands import ask, ended_with, find  # noqa: PLC0415 - 5 ms, for where a driver is

    if find(argv[0], env) is None:
        return None, ()
    called = " ".join(argv)
    try:
        # Once: this stands in the way of a launch, and there is another source. Each signal and
        # exit status is an answer, to be told in our words.
        plain, good = {**env, "LC_ALL": "C"}, range(-64, 256)
        answer = ask(argv, env=plain, time_limit=_TIME_LIMIT, attempts=1, good=good)
    except SchedulerError as error:
        # Its words are about schedulers; the cause is an OSError where it did not start.
        cause = error.__cause__
        why = cause.strerror if isinstance(cause, OSError) else f"no answer in {_TIME_LIMIT:g} s"
        return None, (f"{called} failed: {why}",)
    if answer.status:
        said = _first_line(f"{answer.stdout}\n{answer.stderr}") or "nothing said"
        return None, (f"{called} failed with {ended_with(answer.status)}: {said}",)
    return answer.stdout, ()


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:120] if lines else ""


# What the kernel of this host shows of accelerators, in /dev and /sys.


@dataclass(frozen=True, slots=True)
class Shown:
    """Devices of one vendor; a count of None: a driver is there and they cannot be counted."""

    vendor: str
    device_type: str
    count: int | None
    source: str
    notes: tuple[str, ...] = ()


def shown_devices(root: str = "/", *, flat: bool = True) -> list[Shown]:
    """Return one entry for each vendor whose driver this host shows, in order of preference."""
    shown = []
    names = _listdir(f"{root}/dev")
    count = sum(_numbered(name, "nvidia") for name in names)
    if count or "nvidiactl" in names:
        shown.append(Shown("nvidia", "cuda", count, f"{count} x /dev/nvidia<N>"))
    elif "dxg" in names:
        # Windows' Linux: one file for every GPU of any vendor (Microsoft, "WSL GPU support").
        source = "/dev/dxg (WSL), which does not tell how many"
        shown.append(Shown("nvidia", "cuda", None, source))
    if os.path.exists(f"{root}/dev/kfd"):
        nodes = f"{root}/sys/class/kfd/kfd/topology/nodes"
        # A node without SIMDs is a CPU (Linux, kfd_topology.c). The driver denies reading the
        # properties of a GPU outside this job's cgroup.
        facts = [_facts(f"{nodes}/{node}/properties", " ") for node in _listdir(nodes)]
        count = sum(each.get("simd_count", "0").strip() not in ("", "0") for each in facts)
        shown.append(Shown("amd", "cuda", count, f"{count} GPUs in /sys/class/kfd (ROCm)"))
    if cards := intel_cards(root):
        count = sum(tiles or 1 for _, tiles in cards) if flat else len(cards)
        source = (
            f"{count} {'tiles' if flat else 'cards'} of {len(cards)} Intel cards in /sys/class/drm"
        )
        unknown = ", ".join(address for address, tiles in cards if flat and not tiles)
        note = f"sysfs shows no tiles of {unknown}: counted as one device each"
        shown.append(Shown("intel", "xpu", count, source, (note,) if unknown else ()))
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        shown.append(Shown("apple", "mps", 1, "an Apple silicon Mac"))
    return shown


def intel_cards(root: str = "/") -> list[tuple[str, int]]:
    """Return PCI address and tiles (0: not shown) of each discrete Intel GPU that we may open."""
    cards = []
    for name in sorted(_listdir(f"{root}/sys/class/drm")):
        # sysfs shows a container every card of the host; /dev only those it was given.
        if not name.startswith("renderD") or not os.path.exists(f"{root}/dev/dri/{name}"):
            continue
        device = f"{root}/sys/class/drm/{name}/device"
        # The PCI bus writes DRIVER, PCI_CLASS, PCI_ID and PCI_SLOT_NAME (Linux, pci-driver.c).
        facts = _facts(f"{device}/uevent", "=")
        address = facts.get("PCI_SLOT_NAME", "").lower()
        # A display controller of Intel; hexadecimal without leading zeros: 38000 is class 03.
        is_gpu = facts.get("PCI_CLASS", "").zfill(6).startswith("03")
        # The graphics inside a CPU sit at 0000:00:02, as a VGA controller or, where another card
        # drives the screen, as a display controller, which a data-centre card is too.
        if is_gpu and facts.get("PCI_ID", "")[:5] == "8086:" and address[:11] != "0000:00:02.":
            cards.append((address, _tiles(device)))
    return cards


def _tiles(device: str) -> int:
    """Count tiles: the xe driver has device/tile<N>, i915 has card<N>/gt/gt<N>."""
    # xe: a tile may hold several GTs, so its tiles are counted (Linux, xe_tile.c, "Multi-tile
    # Design"). i915: one GT a tile on discrete cards ("Create a gt/ directory in sysfs", 2022).
    tiles = sum(_numbered(name, "tile") for name in _listdir(device))
    if tiles:
        return tiles
    for name in _listdir(f"{device}/drm"):
        if _numbered(name, "card"):
            return sum(_numbered(gt, "gt") for gt in _listdir(f"{device}/drm/{name}/gt"))
    return 0


def _numbered(name: str, stem: str) -> bool:
    return name.startswith(stem) and name[len(stem) :].isdigit()


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []  # no driver, no directory, or none for us


def _facts(path: str, separator: str) -> dict[str, str]:
    return dict(line.partition(separator)[::2] for line in _read(path).splitlines())
