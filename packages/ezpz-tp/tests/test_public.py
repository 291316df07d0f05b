import types

import pytest

import ezpz_tp


def test_all_is_what_is_there():
    public = {
        name
        for name in dir(ezpz_tp)
        if not name.startswith("_") and not isinstance(getattr(ezpz_tp, name), types.ModuleType)
    }
    assert set(ezpz_tp.__all__) == public - {"TYPE_CHECKING"} | {"__version__"}


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="'ezpz_tp' has no attribute 'TensorParallel'"):
        ezpz_tp.TensorParallel  # noqa: B018
