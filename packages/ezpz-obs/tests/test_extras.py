"""What is tested where the extras are installed only."""

import pytest


@pytest.mark.parametrize("name", ["jinja2", "matplotlib", "plotext", "pyarrow", "xarray"])
def test_reports_are_tested(name):
    pytest.importorskip(name, reason=f"{name} is not installed: reports are not tested here")
