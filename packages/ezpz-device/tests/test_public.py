import types

import ezpz_device


def test_all_is_what_is_there():
    public = {
        name
        for name, value in vars(ezpz_device).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(ezpz_device.__all__) == public | {"__version__"}
