import subprocess
import sys

import pytest

import ezpz_launch


def test_all_is_what_is_there():
    for name in ezpz_launch.__all__:
        assert getattr(ezpz_launch, name) is not None
    public = {name for name in vars(ezpz_launch) if not name.startswith("_")} | {"__version__"}
    assert set(ezpz_launch.__all__) == public - {"TYPE_CHECKING"}
    assert dir(ezpz_launch) == sorted(ezpz_launch.__all__)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'launch'"):
        ezpz_launch.launch  # noqa: B018


def test_nothing_is_loaded_before_it_is_used():
    code = (
        "import sys; before = {*sys.modules}; import ezpz_launch; print(*{*sys.modules} - before)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(out.stdout.split()) == {"ezpz_launch", "ezpz_launch._version"}


def test_public_names_have_docstrings():
    for name in set(ezpz_launch.__all__) - {"__version__"}:
        value = getattr(ezpz_launch, name)
        if callable(value):
            assert value.__doc__, name
