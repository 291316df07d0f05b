import types

import pytest

import ezpz_tp as tp


def test_all_is_what_is_there():
    public = {
        name
        for name in dir(tp)
        if not name.startswith("_") and not isinstance(getattr(tp, name), types.ModuleType)
    }
    assert set(tp.__all__) == public - {"TYPE_CHECKING"} | {"__version__"}


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="'ezpz_tp' has no attribute 'TensorParallel'"):
        tp.TensorParallel  # noqa: B018
