"""Requests for the keys of many ranks."""

from __future__ import annotations

from typing import Any

from torch.distributed import HashStore

from ezpz_dist._store import arrived, set_all, values

MANY = [f"facts/{rank}" for rank in range(10_080)]


class Counted(HashStore):
    """A store that notes how many keys each request names."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.asked.append(len(keys))
        super().multi_set(keys, values)

    def check(self, keys: list[str]) -> bool:
        self.asked.append(len(keys))
        return bool(super().check(keys))

    def multi_get(self, keys: list[str]) -> list[Any]:
        self.asked.append(len(keys))
        return list(super().multi_get(keys))


def filled(keys: list[str]) -> Counted:
    store = Counted()
    for key in keys:
        store.set(key, key)
    return store


def test_no_request_grows_with_the_number_of_ranks() -> None:
    # A server's time for a request grows with the square of its length.
    store = filled(MANY)
    assert arrived(store, MANY, 1.0) == MANY
    assert [value.decode() for value in values(store, MANY)] == MANY
    set_all(store, MANY, "!")
    assert set(store.multi_get(MANY[:1000])) == {b"!"}
    assert max(store.asked) <= 1024
    assert len(store.asked) < 3 * len(MANY) / 1000 + 2


def test_a_look_ends_at_the_first_part_that_misses_one() -> None:
    store = filled(MANY[1:])
    assert arrived(store, MANY, 0.0) == MANY[1:]
    assert max(store.asked) <= 1024


def test_nothing_asked_for_is_there() -> None:
    store = filled([])
    assert arrived(store, [], 1.0) == []
    assert values(store, []) == []
    assert store.asked == []
