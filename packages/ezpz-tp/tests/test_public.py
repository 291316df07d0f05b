import importlib
import inspect
import pickle
import types

import pytest

import ezpz_tp as tp
from ezpz_tp import mpu, parallel_state


@pytest.mark.parametrize("name", ["", ".testing", ".tensor_parallel", ".model_parallel"])
def test_all_is_what_is_there(name):
    face = importlib.import_module(f"ezpz_tp{name}")
    public = {
        name
        for name in dir(face)
        if not name.startswith("_") and not isinstance(getattr(face, name), types.ModuleType)
    }
    assert set(face.__all__) - {"__version__"} == public - {"TYPE_CHECKING"}


def test_names_of_megatrons_groups_are_there_once_and_told():
    assert set(parallel_state.__all__) < set(mpu.__all__)
    for name in mpu.__all__:
        found = getattr(mpu, name)
        assert inspect.getdoc(found), name
        assert pickle.loads(pickle.dumps(found)) is found, name
    for names in (parallel_state.__all__, mpu.__all__):
        assert len(set(names)) == len(names)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="'ezpz_tp' has no attribute 'TensorParallel'"):
        tp.TensorParallel  # noqa: B018
