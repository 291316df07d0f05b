import subprocess
import sys
import types

import pytest

import ezpz_dist


def test_all_is_what_is_there():
    for name in ezpz_dist.__all__:
        assert getattr(ezpz_dist, name) is not None
    public = {
        name
        for name, value in vars(ezpz_dist).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert set(ezpz_dist.__all__) == (public | {"__version__"}) - {"TYPE_CHECKING"}
    assert set(ezpz_dist.__all__) <= set(dir(ezpz_dist))


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'setup'"):
        ezpz_dist.setup  # noqa: B018


def test_importing_brings_nothing_heavy_beyond_torch():
    code = (
        "import torch.distributed, sys; before = {*sys.modules}; import ezpz_dist; "
        "print(*{*sys.modules} - before)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = {name.partition(".")[0] for name in out.stdout.split()}
    assert brought - sys.stdlib_module_names == {"ezpz_dist", "ezpz_device", "ezpz_topo"}
