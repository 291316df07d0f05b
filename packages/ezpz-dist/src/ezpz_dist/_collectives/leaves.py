"""A dict of dicts as a row of leaves, in an order that does not depend on insertion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def unfold(obj: object) -> tuple[list[str], list[Any]]:
    """Return keys in words, and a leaf for each; the key is empty where ``obj`` is no dict.

    Raises:
        TypeError: A key is neither a string nor an int: others need not look alike on all ranks.
    """
    if not isinstance(obj, dict):
        return [""], [obj]
    keys: list[str] = []
    leaves: list[Any] = []
    _collect(obj, "", keys, leaves)
    return keys, leaves


def refold(obj: Any, results: Iterator[Any]) -> Any:
    """Return an object like ``obj``, its leaves replaced in `unfold`'s order."""
    if not isinstance(obj, dict):
        return next(results)
    done = dict.fromkeys(obj)
    for key in _order(obj):
        value = obj[key]
        done[key] = refold(value, results) if isinstance(value, dict) and value else next(results)
    return done


def _collect(mapping: dict[Any, Any], above: str, keys: list[str], leaves: list[Any]) -> None:
    for key in _order(mapping):
        if not isinstance(key, (str, int)):
            raise TypeError(f"all_reduce of a dict with the key {key!r}; expected strings or ints")
        value = mapping[key]
        if isinstance(value, dict) and value:
            _collect(value, f"{above}{key!r} > ", keys, leaves)
        else:
            keys.append(f"{above}{key!r}")
            leaves.append(value)


def _order(mapping: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(mapping)
    except TypeError:  # strings and ints
        return sorted(mapping, key=repr)
