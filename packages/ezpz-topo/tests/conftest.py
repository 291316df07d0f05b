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
