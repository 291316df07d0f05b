"""What makes a check-point one: its files with size and checksum, and what is in it."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ezpz_dist._version import __version__

from .folder import MANIFEST, parse
from .store import Store

FORMAT = 1
_LONGEST = 1 << 30
_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of taking JSON for something that it is not: ``int(Infinity)``, ``[].get``."""

_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Written:
    """A file as it was written.

    Attributes:
        size: In bytes.
        crc32: `zlib.crc32` of them.
    """

    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the manifest of a check-point says.

    Attributes:
        step: The step.
        world_size: Of the ranks that wrote it.
        contents: Of ``model``, ``optimizer``, ``scheduler``, ``data``, ``extra``, ``rng``.
        time: When it was complete, in seconds since 1970, by rank 0's clock.
        torch: torch's version.
        files: By name.
        sequence: One more than that of the one saved before it; 0 where that was not counted yet.
    """

    step: int
    world_size: int
    contents: tuple[str, ...]
    time: float
    torch: str
    files: Mapping[str, Written]
    sequence: int = 0

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files.values())


def encode(manifest: Manifest) -> bytes:
    """Return a manifest's file: JSON with a checksum of itself."""
    files = {name: [one.size, f"{one.crc32:08x}"] for name, one in manifest.files.items()}
    about = {"format": FORMAT, **asdict(manifest), "files": files}
    about |= {"ezpz_dist": __version__, "python": sys.version.split()[0]}
    return json.dumps({"checkpoint": about, "crc32": f"{_checksum(about):08x}"}, indent=1).encode()


def _checksum(about: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def decode(data: bytes) -> Manifest:
    """Return what a manifest's file says.

    Raises:
        ValueError: It is damaged, or of a format that this version does not know.
    """
    try:
        whole = json.loads(data)
        about, said = whole["checkpoint"], int(whole["crc32"], 16)
        found, version = _checksum(about), about.get("format")
    except _MALFORMED as error:
        raise ValueError(f"{MANIFEST} is damaged ({error})") from error
    if found != said:
        raise ValueError(f"{MANIFEST} is damaged: crc32 {found:08x}; expected {said:08x}")
    if version != FORMAT:
        raise ValueError(f"{MANIFEST} has format {version!r}; this ezpz_dist reads {FORMAT}")
    try:
        files = {name: Written(int(n), int(c, 16)) for name, (n, c) in about["files"].items()}
        return Manifest(
            int(about["step"]), int(about["world_size"]), tuple(map(str, about["contents"])),
            float(about["time"]), str(about["torch"]), files, int(about.get("sequence", 0)),
        )  # fmt: skip
    except _MALFORMED as error:
        raise ValueError(f"{MANIFEST} is damaged ({error!r})") from error


def read_manifest(store: Store, folder: str) -> Manifest:
    """Return a check-point's manifest.

    Raises:
        ValueError: There is none, it is damaged or another step's, or it cannot be read.
    """
    path = f"{folder}/{MANIFEST}"
    try:
        size = store.size(path)
        if size is None:
            raise ValueError(f"there is no {MANIFEST}: it was never completed")
        if size > _LONGEST:
            raise ValueError(f"{MANIFEST} has {size} bytes; expected at most {_LONGEST}")
        with store.open(path, "rb") as file:
            manifest = decode(file.read())
    except OSError as error:
        raise ValueError(f"{MANIFEST} cannot be read ({error})") from error
    name = parse(folder)
    if name is not None and name.step != manifest.step:
        raise ValueError(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def damage_of(store: Store, folder: str, name: str, said: Written) -> str | None:
    """Read a file through and return what is wrong with it; None: it is as it was written."""
    path = f"{folder}/{name}"
    crc = size = 0
    block = bytearray(_BLOCK)
    view = memoryview(block)
    try:
        found = store.size(path)
        if found is None:
            return f"{name} is missing"
        if found != said.size:
            return f"{name} has {found} bytes; expected {said.size}"
        with store.open(path, "rb") as file:
            # A device has size 0 and no end.
            while size <= said.size and (count := file.readinto(block)):  # type: ignore[attr-defined]
                crc = zlib.crc32(view[:count], crc)
                size += count
    except OSError as error:
        return f"{name} cannot be read ({error})"
    if size != said.size:
        return f"{name} has {size} bytes; expected {said.size}"
    if crc != said.crc32:
        return f"{name} has crc32 {crc:08x}; expected {said.crc32:08x}"
    return None
