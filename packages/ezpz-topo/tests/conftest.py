import contextlib
import os

import pytest

with contextlib.suppress(ImportError):  # where the package is tested alone
    from hypothesis import HealthCheck, settings
    from hypothesis.configuration import set_hypothesis_home_dir

    # Not even its caches go into the working directory.
    set_hypothesis_home_dir(os.devnull)
    checks = [HealthCheck.function_scoped_fixture]
    settings.register_profile("quiet", database=None, deadline=None, derandomize=True,
                              max_examples=100, suppress_health_check=checks)  # fmt: skip
    settings.load_profile("quiet")


@pytest.fixture
def command(tmp_path):
    """Make a command of these lines of sh in the test's folder."""

    def make(name, body):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    return make
