import os

import pytest


@pytest.fixture
def unprivileged():
    """Run the test without root's right to everything, as another user where we are root."""
    me = os.geteuid()
    if me != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)


@pytest.fixture
def command(tmp_path):
    """Make a command of these lines of sh in the test's folder."""

    def make(name, body):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)

    return make
