"""The vendors' own lists of devices: nvidia-smi, amd-smi or rocm-smi, xpu-smi.

Each is asked only where its driver is there, once, with a time limit; a tool that fails
becomes a note, and the kernel's files are believed instead. nvidia-smi promises no stable
output (its manual page), so what does not look as expected is a failure too, never a zero.

From documentation; not run on AMD and Intel hardware.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ._commands import ask, find
from ._devices import devices_of_cards, intel_cards
from ._errors import SchedulerError

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
