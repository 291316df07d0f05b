import pytest

import ezpz_obs

HEAVY = ("torch", "matplotlib", "jinja2", "wandb", "mlflow", "tensorboard", "xarray",
         "plotext", "pyarrow", "fire", "trackio", "requests")  # fmt: skip


def test_all_is_what_is_there():
    for name in ezpz_obs.__all__:
        assert getattr(ezpz_obs, name) is not None
    assert {"History", "get_logger"} < set(ezpz_obs.__all__) <= set(dir(ezpz_obs))


@pytest.mark.parametrize(
    "code",
    [
        "import ezpz_obs; ezpz_obs.History().update({'loss': 1.0})",
        "import ezpz_obs; ezpz_obs.get_logger('x').info('hello')",
        "import ezpz_obs; [getattr(ezpz_obs, name) for name in ezpz_obs.__all__]",
    ],
)
def test_what_is_heavy_is_imported_when_it_is_used(code, python):
    code += f"; import sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert python(code).stdout == "[]\n"


@pytest.mark.parametrize("name", ["jinja2", "matplotlib", "plotext", "pyarrow", "xarray"])
def test_reports_are_tested(name):
    pytest.importorskip(name, reason=f"{name} is not installed: reports are not tested here")
