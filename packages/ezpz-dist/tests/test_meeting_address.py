"""What a name stands for, and which address of this host others can reach."""

import socket
import time

import pytest

from ezpz_dist import SetupError, _address
from ezpz_dist._rendezvous import gloo_interface
from ezpz_topo import RankInfo, get_hostname

ONE_NODE = RankInfo(1, 2, 1, 2, 0, "pmi")
TWO_NODES = RankInfo(1, 2, 0, 1, None, "pmi")


def test_an_address_stands_for_itself():
    assert _address.look_up("127.0.0.1") == (("127.0.0.1",), "")
    assert _address.look_up("::1") == (("::1",), "")
    assert _address.literal("[::1]") == "::1"
    assert _address.literal("h") == "h"


def test_a_name_stands_for_addresses():
    found = _address.resolve("localhost", TWO_NODES, "MASTER_ADDR")
    assert set(found) <= {"127.0.0.1", "::1"}
    assert all(_address.is_own(each) and _address.is_loopback(each) for each in found)


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 300, "b\u00e4h" * 99])
def test_a_name_that_does_not_resolve_is_an_error_within_2_s(name):
    start = time.monotonic()
    with pytest.raises(SetupError) as caught:
        _address.resolve(name, TWO_NODES, "MASTER_ADDR")
    assert time.monotonic() - start < 60  # 2 s, and a busy machine
    said = str(caught.value)
    assert said.startswith(f"rank 1 of 2 on {get_hostname()}: MASTER_ADDR is {name!r}, which does")
    assert "export MASTER_ADDR and MASTER_PORT to name another" in said


def test_a_name_may_come_to_be_known_a_moment_later(monkeypatch):
    # What a name server does cannot be arranged here: its answers are given by hand.
    answers = [socket.gaierror(socket.EAI_AGAIN, "later"), ("10.1.2.3",)]

    def ask(host):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(_address, "_ask", ask)
    assert _address.resolve("h", TWO_NODES, "MASTER_ADDR") == ("10.1.2.3",)


def test_a_resolver_that_does_not_answer_is_left_behind(monkeypatch):
    def ask(host):
        time.sleep(4)
        return ("10.1.2.3",)

    monkeypatch.setattr(_address, "_ask", ask)
    monkeypatch.setattr(_address, "_LONGEST", 0.1)
    assert _address.look_up("h") == ((), "the resolver has not answered in 0.1 s")


def test_whose_an_address_is():
    assert _address.is_own("127.0.0.1")
    assert not _address.is_own("192.0.2.1")  # RFC 5737: nobody's
    assert not _address.is_own("2001:db8::1")


@pytest.mark.parametrize(
    ("machine", "host", "expected"),
    [
        ("aurora", "x4102c0s0b0n0", "x4102c0s0b0n0.hsn.cm.aurora.alcf.anl.gov"),
        ("aurora", "x4102c0s0b0n0.example", "x4102c0s0b0n0.hsn.cm.aurora.alcf.anl.gov"),
        ("aurora", "10.0.0.1", "10.0.0.1"),
        ("aurora", "fe80::1", "fe80::1"),
        ("perlmutter", "nid001", "nid001"),
    ],
)
def test_the_fast_network(machine, host, expected):
    assert _address.on_fast_network(host, {"EZPZ_MACHINE": machine}) == expected


def test_one_node_needs_no_name():
    assert _address.advertised(ONE_NODE, {}) == "127.0.0.1"


def test_a_host_whose_name_means_loopback_advertises_an_address(monkeypatch):
    # This machine's own name cannot be changed for a test: another's is looked up.
    outward = _address.outward_address()
    if outward is None:
        pytest.skip("no interface here but loopback")
    monkeypatch.setattr(_address, "get_hostname", lambda: "localhost")
    assert _address.advertised(TWO_NODES, {}) == outward
    assert _address.is_own(outward)
    monkeypatch.setattr(_address, "get_hostname", lambda: outward)
    assert _address.advertised(TWO_NODES, {}) == outward


def test_a_host_without_an_address_says_so(monkeypatch):
    monkeypatch.setattr(_address, "get_hostname", lambda: "localhost")
    monkeypatch.setattr(_address, "outward_address", lambda: None)
    with pytest.raises(SetupError, match=r"rank 0's host localhost has no address that other no"):
        _address.advertised(TWO_NODES, {})


def test_gloo_is_told_an_interface_only_where_it_would_err(monkeypatch):
    module = "ezpz_dist._rendezvous"
    monkeypatch.setattr(f"{module}.get_hostname", lambda: "localhost")
    outward = _address.outward_interface()
    assert gloo_interface(TWO_NODES, "127.0.0.1", 29500, {}) == outward
    assert gloo_interface(TWO_NODES, "127.0.0.1", 29500, {"GLOO_SOCKET_IFNAME": "x"}) is None
    assert gloo_interface(ONE_NODE, "127.0.0.1", 29500, {}) is None
    own = _address.outward_address()
    if own is not None:
        assert outward in {name for _, name in socket.if_nameindex()}
        assert gloo_interface(TWO_NODES, own, 29500, {}) == outward
        monkeypatch.setattr(f"{module}.get_hostname", lambda: own)
        assert gloo_interface(TWO_NODES, "127.0.0.1", 29500, {}) is None
