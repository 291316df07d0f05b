"""Who speaks, and at which step; and files that only grow: what logs and runs have in common."""

from __future__ import annotations

import fcntl
import math
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from ezpz_topo import get_rank_info


@dataclass(frozen=True)
class Place:
    rank: int
    world_size: int
    host: str


def find_place(env: Mapping[str, str] | None = None) -> Place:
    """Return who this process is; ``host`` is the name up to its first dot."""
    # torch.distributed knows best, where it is set up: ranks of ``torch.multiprocessing.spawn``
    # have no variables that say who they are.
    host = socket.gethostname().partition(".")[0]
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)  # None while torch is being imported
    if env is None and dist is not None and dist.is_available() and dist.is_initialized():
        return Place(dist.get_rank(), dist.get_world_size(), host)
    info = get_rank_info(os.environ if env is None else env)
    return Place(info.rank, info.world_size, host)


@dataclass(slots=True)
class Now:
    """What this process is doing: the step that a `History` recorded last, or None."""

    step: int | None = None


NOW: Final = Now()  # written by `History` at each record (20 ns), read by every log line


_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def open_to_append(path: Path, *, exclusive: bool = False) -> int:
    """Open or make a file for reading and appending, beside the three standard ones."""
    descriptor = os.open(path, _FLAGS | (os.O_EXCL if exclusive else 0), 0o644)
    if descriptor > 2:
        return descriptor
    # In a process without a standard error this file would be it, and get what native code prints.
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path aside to write to, which is renamed over this one once it is whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


_DEEPEST = 20  # what goes further is a cycle, as likely as not
_LONGEST_REASON = 200  # letters of why an object cannot be shown
_BRACKETS: Final[Mapping[type, tuple[str, str]]] = {
    list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}"), set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}  # fmt: skip


def to_text(value: object, write: Callable[[Any], str] = str) -> str:
    """Return what `str` or `repr` makes of an object; of one that raises its type, and why."""
    return _to_text(value, write, ())


def _to_text(value: object, write: Callable[[Any], str], above: tuple[int, ...]) -> str:
    kind = type(value)  # never isinstance: it asks for __class__, which may raise, too
    try:
        return write(value)
    # Somebody's own method, which may raise anything: what shows a value must not end a training.
    except Exception as error:  # noqa: BLE001
        if kind not in _BRACKETS or len(above) > _DEEPEST:
            is_str = write is str and kind.__str__ is not object.__str__
            return describe_failure(value, "__str__" if is_str else "__repr__", error)
    # One of Python's own containers shows all but what in it cannot be shown.
    if id(value) in above:
        return "..."
    inside = (*above, id(value))
    if kind is dict:
        pairs = cast("dict[object, object]", value).items()
        shown = [f"{_to_text(k, repr, inside)}: {_to_text(v, repr, inside)}" for k, v in pairs]
    else:
        shown = [_to_text(one, repr, inside) for one in cast("Iterable[object]", value)]
    comma = "," if kind is tuple and len(shown) == 1 else ""
    first, last = _BRACKETS[kind]
    return f"{first}{', '.join(shown)}{comma}{last}"


def describe_failure(value: object, method: str, error: Exception) -> str:
    """Return ``<Config: __repr__ raised KeyError: 'lr'>``."""
    try:
        reason = f": {error}".partition("\n")[0][:_LONGEST_REASON]
    except Exception:  # noqa: BLE001  # the error's own __str__, likewise
        reason = ""
    return f"<{type(value).__name__}: {method} raised {type(error).__name__}{reason}>"


_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_KNOWN = (str, int, float, Mapping, list, tuple, set, frozenset, type(None))
_HOLDERS = (Mapping, list, tuple, set, frozenset)


def to_json(value: Any, said: Callable[[Any], object], depth: int = 0) -> Any:
    """Return what orjson takes; ``said`` gives text, or a number, of what JSON has no word for."""
    # By type, not isinstance: an object that stands for another may raise when it is asked.
    if not issubclass(type(value), _KNOWN):
        value = said(value)
    if issubclass(type(value), _HOLDERS):
        return "..." if depth > _DEEPEST else _to_json_inside(value, said, depth + 1)
    if isinstance(value, float):
        # Python's words for the three that JSON has none for are others'.
        return float(value) if math.isfinite(value) else _NOT_FINITE[str(float(value))]
    if value is None or (isinstance(value, int) and -(1 << 63) <= value < 1 << 64):
        return value
    return _encodable(value if isinstance(value, str) else str(said(value)))


def _to_json_inside(value: Any, said: Callable[[Any], object], depth: int) -> Any:
    if not issubclass(type(value), Mapping):
        return [to_json(one, said, depth) for one in value]
    try:
        items = list(value.items())
    # Somebody's mapping, such as a configuration in which a value is missing.
    except Exception as error:  # noqa: BLE001
        return describe_failure(value, "items", error)
    names = (key if issubclass(type(key), str) else str(said(key)) for key, _ in items)
    inner = (to_json(one, said, depth) for _, one in items)
    return dict(zip(map(_encodable, names), inner, strict=True))


def _encodable(text: str) -> str:
    # Names of files in another encoding hold surrogates, which UTF-8 has not.
    return text.encode("utf-8", "backslashreplace").decode()
