"""Who is missing, asked of a store with thousands of keys."""

import pytest

from ezpz_obs._across import _missing


class Store:
    """Notes how many keys each request names."""

    def __init__(self, there):
        self.there, self.asked = there, []

    def check(self, keys):
        self.asked.append(len(keys))
        return all(int(key) in self.there for key in keys)


@pytest.mark.parametrize("missing", [[], [7], [0, 5000, 10_079], list(range(500, 530))])
def test_few_are_found_among_many_by_few_requests(missing):
    store = Store(set(range(10_080)) - set(missing))
    assert _missing(store, range(10_080)) == missing
    assert max(store.asked) <= 1024
    assert len(store.asked) < 100
