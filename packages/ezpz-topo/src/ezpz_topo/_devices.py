"""What the kernel of this host shows of accelerators, in /dev and /sys.

AMD and Intel from documentation and kernel sources; not run on that hardware.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

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
