import subprocess
import sys

import pytest

import ezpz_dist
from ezpz_dist import DistError


def test_all_is_what_is_there():
    for name in ezpz_dist.__all__:
        assert getattr(ezpz_dist, name) is not None
        assert not name.endswith("Error") or issubclass(getattr(ezpz_dist, name), DistError)
    assert {"setup_torch", "Watch"} < set(ezpz_dist.__all__) <= set(dir(ezpz_dist))


@pytest.mark.slow
def test_importing_brings_nothing_heavy_beyond_torch():
    code = (
        "import torch.distributed, sys; before = {*sys.modules}; "
        "from ezpz_dist import barrier, setup_torch; print(*{*sys.modules} - before)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = {name.partition(".")[0] for name in out.stdout.split()}
    assert brought - sys.stdlib_module_names == {"ezpz_dist", "ezpz_device", "ezpz_topo"}
