"""Whatever a nodelist holds: the hosts or a NodelistError, at no cost, and back again."""

import os
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir

from ezpz_topo import NodelistError, expand_nodelist, first_host, fold_nodelist

# Not even its caches go into the working directory.
set_hypothesis_home_dir(os.devnull)
QUIET = settings(database=None, deadline=None, derandomize=True, max_examples=200)

ANY_TEXT = st.one_of(st.text(max_size=100), st.text("[]-,0123456789abc \t", max_size=60))


@st.composite
def ranges(draw):
    low = draw(st.integers(0, 200))
    width = draw(st.integers(1, 5))
    text = f"{low:0{width}d}"
    return f"{text}-{low + draw(st.integers(0, 6))}" if draw(st.booleans()) else text


LITERALS = st.text("abcxyz-._0123456789", max_size=5)
BRACKETS = st.lists(ranges(), min_size=1, max_size=3).map(lambda parts: f"[{','.join(parts)}]")


@st.composite
def names(draw):
    """A name with up to four brackets, text between them and after the last."""
    text = draw(st.sampled_from(["n", "nid", "x1c", "gpu-"]))
    for bracket in draw(st.lists(BRACKETS, max_size=2)):
        text += draw(LITERALS) + bracket
    return text + draw(LITERALS)


NODELISTS = st.lists(names(), max_size=5).map(",".join)


@QUIET
@given(ANY_TEXT)
def test_expanding_answers_or_raises_nodelist_error(text):
    try:
        hosts = expand_nodelist(text)
    except NodelistError:
        return
    assert not any(set(host) & set("[], \t") for host in hosts)


@QUIET
@given(ANY_TEXT)
def test_the_first_host_is_the_first(text):
    try:
        hosts = expand_nodelist(text)
    except NodelistError:
        hosts = []
    try:
        first = first_host(text)
    except NodelistError:
        assert not hosts
        return
    assert hosts[:1] in ([], [first])


@QUIET
@given(NODELISTS)
def test_folding_undoes_expanding(nodelist):
    hosts = expand_nodelist(nodelist)
    assert expand_nodelist(fold_nodelist(hosts)) == hosts
    assert not hosts or first_host(nodelist) == hosts[0]


@QUIET
@given(st.lists(st.text("ab0189", min_size=1, max_size=20), max_size=20))
def test_folding_keeps_any_names(hosts):
    assert expand_nodelist(fold_nodelist(hosts)) == hosts


@QUIET
@given(st.lists(st.one_of(ANY_TEXT, st.text(max_size=3)), max_size=6))
def test_folding_answers_or_raises_nodelist_error(hosts):
    try:
        nodelist = fold_nodelist(hosts)
    except NodelistError:
        return
    assert expand_nodelist(nodelist) == hosts


@pytest.mark.parametrize(
    "nodelist",
    [
        "n[1-100000000]",
        "n[0-999999999999999]",
        "n[1-1000][1-1000][1-1000]",
        "[1-9]" * 40,
        ",".join(["n[1-1000000]"] * 20),
        "n[" + ",".join(["1-1000000"] * 20) + "]",
        "a,b,n[1-100000000],c",
    ],
)
def test_a_hostile_list_is_refused_without_making_it(nodelist):
    tracemalloc.start()
    try:
        with pytest.raises(NodelistError, match="expected at most"):
            expand_nodelist(nodelist, max_hosts=100_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_the_first_host_of_a_hostile_list_costs_nothing():
    tracemalloc.start()
    try:
        assert first_host("n[007-100000000][1-1000000]") == "n0071"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
