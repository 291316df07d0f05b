"""The two hosts for a session, and the programs that the tests start on them."""

import pytest
from tests.conftest import load


@pytest.fixture(scope="session")
def sandbox():
    """The module ``sandbox.py``."""
    return load("hosts.sandbox")


@pytest.fixture(scope="session")
def session_hosts(sandbox):
    """Two hosts, started once."""
    if reason := sandbox.missing():
        pytest.skip(reason)
    with sandbox.TwoHosts() as running:
        yield running


@pytest.fixture
def hosts(session_hosts):
    """The two hosts; what a test starts or writes there ends with it, also if it fails."""
    yield session_hosts
    session_hosts.reset()
