from types import ModuleType

import ezpz_device


def test_all_is_what_is_there():
    names = {name for name, value in vars(ezpz_device).items() if not isinstance(value, ModuleType)}
    public = {name for name in names if not name.startswith("_")}
    assert set(ezpz_device.__all__) == public | {"__version__"}
