"""What is no tensor, as bytes that are read without running code."""

from __future__ import annotations

import datetime as dt
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch


def encode(what: str, value: Any) -> bytes:
    """Return an object's bytes, having made sure that they can be read again.

    Args:
        what: Its name, for the message.
        value: Numbers, strings, tensors, None, and tuples, lists, sets and dicts of them.

    Raises:
        TypeError: It is something else, and would be readable only by running code.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        decode(what, stream.getvalue())
    except (ValueError, TypeError, AttributeError, pickle.PicklingError, RuntimeError) as error:
        culprit = _first_culprit(value) or f"{what} ({str(error).splitlines()[0]})"
        raise TypeError(
            f"{culprit} cannot be saved so that it can be read without running code; expected "
            "numbers, strings, tensors, None, and tuples, lists and dicts of them"
        ) from error
    return stream.getvalue()


def plain(value: Any) -> Any:
    """Return a value with common types inside as plain ones; what is none of these as it is."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, Enum):
        value = plain(value.value)
    elif numpy and isinstance(value, numpy.generic):
        number = value.item()
        value = value if isinstance(number, numpy.generic) else plain(number)
    elif isinstance(value, PurePath):
        value = str(value)
    elif isinstance(value, dt.date | dt.time):
        value = value.isoformat()
    elif isinstance(value, dt.timedelta):
        value = value.total_seconds()
    elif type(value) in (dict, OrderedDict):
        value = type(value)((plain(key), plain(each)) for key, each in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        value = tuple(map(plain, value))
    elif type(value) in (list, tuple, set):
        value = type(value)(map(plain, value))
    return value


def decode(what: str, data: bytes) -> Any:
    """Return an object from its bytes. Never runs code that is in them.

    Raises:
        ValueError: They are damaged, or hold more than `encode` writes.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{what} is damaged, or holds what is not read because it could run code: {reason}"
        ) from error


_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.Tensor, torch.dtype, torch.Size)


def _first_culprit(value: Any) -> str | None:
    named = value.items() if isinstance(value, dict) else ()
    return next((found for key, each in named if (found := _culprit(str(key), each))), None)


def _culprit(path: str, value: Any) -> str | None:
    """Return the first thing inside that is not plain, with its place; None: all is."""
    if isinstance(value, dict):
        items = [(f"{path}[{key!r}]", each) for key, each in value.items()]
        items += [(f"a key of {path}", key) for key in value]
    elif type(value) in (list, tuple, set):
        items = [(f"{path}[{number}]", each) for number, each in enumerate(value)]
    elif type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return None
    else:
        return f"{path}, of type {type(value).__module__}.{type(value).__qualname__},"
    search: Callable[[str, Any], str | None] = _culprit
    return next((found for each in items if (found := search(*each))), None)
