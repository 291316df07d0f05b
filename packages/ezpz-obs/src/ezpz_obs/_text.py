"""Values as text and as JSON, whatever they are: what shows a value must not end a training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

_DEEPEST: Final = 20  # nesting beyond it is a cycle, as likely as not
_LONGEST: Final = 2000  # letters of an object that is no number, string, list or mapping
_LONGEST_REASON: Final = 200
_LONGEST_ERROR: Final = 500
_LARGEST_INTEGERS: Final = (-(1 << 63), (1 << 64) - 1)  # that JSON's readers take
NOT_FINITE: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def to_text(value: object, write: Callable[[Any], str] = str) -> str:
    """Return what `str` or `repr` makes of an object; of one that raises its type, and why."""
    try:
        return write(value)
    # Somebody's own method, which may raise anything.
    except Exception as error:  # noqa: BLE001
        return describe_failure(value, f"__{write.__name__}__", error)


def describe_failure(value: object, method: str, error: Exception) -> str:
    """Return ``<Config: __repr__ raised KeyError: 'lr'>``."""
    reason = ""
    with suppress(Exception):  # the error's own __str__, likewise
        reason = f": {error}".partition("\n")[0][:_LONGEST_REASON]
    return f"<{type(value).__name__}: {method} raised {type(error).__name__}{reason}>"


def describe_error(error: BaseException) -> str:
    """Return an error's first line: ``OSError: [Errno 28] No space left on device``."""
    return _describe(error, to_text(error).strip().partition("\n")[0])


def describe_error_in_full(error: BaseException) -> str:
    """Return an error with all of its lines in one: the value and the remedy come last."""
    return _describe(error, " ".join(to_text(error).split()))


def _describe(error: BaseException, text: str) -> str:
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text[:_LONGEST_ERROR]}"


def iterate_leaves(mapping: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings under names such as ``model.layers``."""
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from iterate_leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def to_plain(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON has it; what JSON has no word for is a string."""
    # By type, not isinstance: a proxy object may raise at its __class__.
    kind = type(value)
    if issubclass(kind, Mapping):
        return _plain_mapping(value, depth)
    if issubclass(kind, list | tuple | set | frozenset):
        return _plain_list(value, depth)
    if value is None or issubclass(kind, str | int | float):
        return _plain_scalar(value)
    return _plain_object(value, depth)


def _plain_scalar(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return to_unicode(str(value))
    if isinstance(value, int):
        return _plain_integer(int(value))
    return _plain_float(float(value))


def to_unicode(text: str) -> str:
    """Return a text without the surrogates that names of files in another encoding have."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain_integer(value: int) -> int | str:
    low, high = _LARGEST_INTEGERS
    if low <= value <= high:
        return value
    return to_text(value)


def _plain_float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return NOT_FINITE[str(value)]


def _plain_mapping(value: Mapping[Any, Any], depth: int) -> Any:
    if depth > _DEEPEST:
        return "..."
    try:
        items = list(value.items())
    # Somebody's mapping, such as a configuration in which a value is missing.
    except Exception as error:  # noqa: BLE001
        return describe_failure(value, "items", error)
    return {to_unicode(to_text(name)): to_plain(one, depth + 1) for name, one in items}


def _plain_list(values: Iterable[Any], depth: int) -> Any:
    if depth > _DEEPEST:
        return "..."
    return [to_plain(value, depth + 1) for value in values]


def _plain_object(value: Any, depth: int) -> Any:
    try:
        if value.ndim == 0:  # an array or tensor of one number
            return to_plain(value.item(), depth + 1)
    # What only looks like one, or has no such attribute, is a text.
    except Exception:  # noqa: BLE001, S110
        pass
    text = to_unicode(to_text(value))
    if len(text) > _LONGEST:
        return f"{text[:_LONGEST]}..."
    return text
