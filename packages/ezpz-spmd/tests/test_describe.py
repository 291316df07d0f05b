"""The table of a mesh: groups, and the nodes that they cross."""

import random
import re

import pytest

import ezpz_tp as tp
from ezpz_spmd import describe_mesh
from ezpz_tp.testing import counting, run_ranks

NOWHERE = {}  # an environment without LOCAL_WORLD_SIZE


# Four axes on nodes of one size: docs/guides/four-dimensions.md, which is run.
def test_groups_that_cross_nodes_and_the_remedy():
    said = (
        r"^1 of 4 tensor groups cross nodes, with ranks on up to 2: .*; choose a tensor degree "
        r"that divides the number of ranks of every node: 1 or 2$"
    )
    with pytest.warns(UserWarning, match=said) as caught:
        description = describe_mesh(tp.RankLayout(16, tensor=4), ranks_per_node=[6, 6, 4])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert repr(description) == str(description) == (
        """\
16 ranks: tensor 4 x data 4, on 3 nodes of 6, 6 and 4

axis    degree  groups  of rank 0  cross nodes  most nodes
tensor       4       4  0 1 2 3              1           2
data         4       4  0 4 8 12           all           3
Warning: 1 of 4 tensor groups cross nodes, with ranks on up to 2: the
  collectives of every layer leave the node; choose a tensor degree that divides
  the number of ranks of every node: 1 or 2."""
    )  # fmt: skip
    with pytest.warns(UserWarning, match="of every node: 1, 2, 3 or 6$"):
        describe_mesh(tp.RankLayout(12, tensor=4), ranks_per_node=6)
    layout = tp.RankLayout(8, tensor=2, order="dp-tp")
    with pytest.warns(UserWarning, match=r"let tensor vary fastest \(order='tp-cp-ep-dp-pp'\)$"):
        describe_mesh(layout, ranks_per_node=4)
    with pytest.warns(UserWarning, match=r"vary fastest .*; choose .* every node: 1$"):
        describe_mesh(layout, ranks_per_node=1)


def test_ranks_placed_node_after_node_in_turn():
    with pytest.warns(UserWarning, match=r"4 of 4 tensor groups .*srun --distribution=block"):
        description = describe_mesh(tp.RankLayout(8, tensor=2), hosts=["red", "blue"] * 4)
    text = str(description)
    assert "on 2 nodes of 4, not numbered node by node" in text
    assert "Nodes: 0 red, 1 blue" in text


def test_experts_have_axes_of_their_own():
    layout = tp.RankLayout(16, tensor=2, expert=4)
    description = describe_mesh(layout, ranks_per_node=8)
    text = str(description)
    assert text.startswith("16 ranks: tensor 2 x data 8, on 2 nodes of 8\n")
    assert re.search(r"expert +4 +4  0 2 4 6 +none +1", text)
    with pytest.warns(UserWarning, match="4 of 4 expert_tensor groups cross nodes"):
        describe_mesh(tp.RankLayout(16, expert_tensor=4, expert=2), ranks_per_node=2)
    layout = tp.RankLayout(16, tensor=2, pipeline=2, expert=2)  # whose pipelines are one row
    text = str(describe_mesh(layout, ranks_per_node=8))
    table = text[text.index("\naxis") :].splitlines()
    axes = ["tensor", "data", "pipeline", "expert_tensor", "expert", "expert_data"]
    assert [line.split()[0] for line in table[2:]] == axes


@pytest.mark.filterwarnings("ignore:.*groups cross nodes:UserWarning")
def test_groups_and_crossings_agree_with_counting():
    generator = random.Random(0)
    for _ in range(30):
        t, c, p, d = (generator.choice((1, 2, 3, 4)) for _ in range(4))
        layout = tp.RankLayout(t * c * p * d, t, c, p)
        hosts = [f"h{generator.randrange(3)}" for _ in range(layout.world_size)]
        even = [f"h{rank // d}" for rank in range(layout.world_size)]
        for names, how in ((hosts, {"hosts": hosts}), (even, {"ranks_per_node": d})):
            description = describe_mesh(layout, **how)
            table = str(description)
            for axis in ("tensor", "context", "data", "pipeline"):
                groups = layout.groups(axis)
                assert description.groups(axis) == groups
                spans = [len({names[rank] for rank in group}) for group in groups]
                crossing = [g for g, count in zip(groups, spans, strict=True) if count > 1]
                assert description.crossing(axis) == crossing
                if layout.degree(axis) > 1:
                    words = {0: "none", len(groups): "all"}.get(len(crossing), str(len(crossing)))
                    line = re.search(rf"^{axis} +\d+ +\d+ .*$", table, re.MULTILINE)
                    assert line[0].split()[-2:] == [words, str(max(spans))]


def test_the_largest_machine():
    layout = tp.RankLayout(120_960, tensor=12, context=2, pipeline=8)
    text = str(describe_mesh(layout, ranks_per_node=12))
    assert re.search(r"context +2 +60,480  0 12 +all +2$", text, re.MULTILINE)
    assert re.search(r"pipeline +8 +15,120  0 15120 ... 105840 +all +8$", text, re.MULTILINE)
    assert len(text.splitlines()) < 10
    assert max(map(len, text.splitlines())) <= 80


def test_the_environment_tells_the_ranks_of_a_node(monkeypatch):
    layout = tp.RankLayout(8, tensor=2)
    text = str(describe_mesh(layout, environ={"LOCAL_WORLD_SIZE": "4"}))
    assert "on 2 nodes of 4 (LOCAL_WORLD_SIZE)" in text
    assert "on 1 node of 8" in str(describe_mesh(layout, ranks_per_node=8))
    torchrun = {"LOCAL_WORLD_SIZE": "4", "RANK": "5", "WORLD_SIZE": "8"}
    torchrun |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert "on 2 nodes of 4" in str(describe_mesh(layout, environ=torchrun))
    assert "on 4 nodes of 4" in str(describe_mesh(tp.RankLayout(16), environ=torchrun))  # a plan
    named = describe_mesh(layout, hosts=["a", "b"], environ={"LOCAL_WORLD_SIZE": "4"})
    assert "Nodes: 0 a, 1 b" in str(named)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "on 4 nodes of 2 (LOCAL_WORLD_SIZE)" in str(describe_mesh(layout))


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({}, "LOCAL_WORLD_SIZE is not set"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 does not divide 8 ranks"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0' is no number of ranks"),
        ({"LOCAL_WORLD_SIZE": "four"}, "LOCAL_WORLD_SIZE='four' is no number of ranks"),
        (  # torchrun on nodes of 4, 2 and 2
            {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "3"},
            "nodes differ: LOCAL_WORLD_SIZE=4 here, and WORLD_SIZE=8 on GROUP_WORLD_SIZE=3 nodes",
        ),
        (  # ranks dealt out to the nodes in turn
            {"LOCAL_WORLD_SIZE": "4", "RANK": "1", "GROUP_RANK": "1"},
            "RANK=1 is on GROUP_RANK=1, not on node 0 of nodes of LOCAL_WORLD_SIZE=4",
        ),
    ],
)
def test_nodes_that_are_not_known(environ, why):
    description = describe_mesh(tp.RankLayout(8, tensor=2), environ=environ)
    text = str(description)
    assert why in text.replace("\n  ", " ")
    assert "give ranks_per_node=" in text.replace("\n  ", " ")
    assert "cross" not in text
    with pytest.raises(tp.ParallelError, match=f"which tensor groups .* not known: {why}; give"):
        description.crossing("tensor")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"ranks_per_node": 6}, r"6 does not divide 16 ranks; .*ranks_per_node=\[6, 6, 4\]"),
        ({"ranks_per_node": 3}, r"3 does not divide 16 ranks; .*ranks_per_node=\[...\]"),
        ({"ranks_per_node": 32}, r"32 does not divide 16 ranks; .*ranks_per_node=\[16\]"),
        ({"ranks_per_node": 0}, "ranks_per_node=0; expected at least 1"),
        ({"ranks_per_node": [8, 4]}, r"\[8, 4\] is 12 ranks; .* add up to the 16 ranks"),
        ({"ranks_per_node": [17, -1]}, "numbers of at least 1"),
        ({"ranks_per_node": []}, "is 0 ranks"),
        ({"hosts": ["a", "b"]}, "2 hosts for 16 ranks; give the host of every rank, or ranks_per"),
        ({"hosts": ["a", "a"], "ranks_per_node": 8}, r"2 hosts \(1 different ones\) for 2 nodes"),
        ({"hosts": ["a"], "ranks_per_node": 8}, "1 hosts .* for 2 nodes .* one for each node"),
        ({"hosts": "node"}, r"hosts='node'; expected several names"),
    ],
)
def test_nodes_that_do_not_add_up(how, said):
    with pytest.raises(tp.DegreeError, match=said):
        describe_mesh(tp.RankLayout(16), environ=NOWHERE, **how)


def test_many_nodes_are_named_in_part():
    text = str(describe_mesh(tp.RankLayout(40), hosts=[f"nid{i:03}" for i in range(40)]))
    assert "15 nid015, ... 24 more" in text.replace("\n  ", " ")
    assert "on 6 nodes of 1 to 4" in str(
        describe_mesh(tp.RankLayout(16), ranks_per_node=[4, 4, 4, 2, 1, 1])
    )


def test_one_rank():
    with pytest.raises(ValueError, match="axis 'tp'; expected one of tensor, context, data"):
        describe_mesh(tp.RankLayout(1), environ=NOWHERE).groups("tp")
    assert str(describe_mesh(tp.RankLayout(1), environ=NOWHERE)) == "1 rank"


def describe_the_state_of_a_rank():
    state = tp.get_state()
    with counting() as sent:
        mine = describe_mesh(ranks_per_node=2)
        assert str(mine) == str(describe_mesh(state, ranks_per_node=2))
    assert not sent
    assert f"of rank {state.rank}" in str(mine)
    assert state.ranks("tensor") in mine.groups("tensor")
    line = re.search(r"^tensor .*$", str(mine)[-300:], re.MULTILINE)[0]
    assert line.split()[3:5] == [str(rank) for rank in state.ranks("tensor")]
    bare = tp.ParallelState.from_groups(tensor=state.group("tensor"), rank=state.rank)
    with pytest.raises(tp.ParallelError, match=r"without a layout.*layout=RankLayout\(...\)"):
        describe_mesh(bare)


def test_a_state_is_described_without_a_collective():
    run_ranks(describe_the_state_of_a_rank, 4, tensor=2)


def test_what_cannot_be_described():
    with pytest.raises(tp.NotInitializedError, match="initialize_tensor_parallel"):
        describe_mesh()
    with pytest.raises(TypeError, match=r"describe_mesh\(int\); expected a ParallelState or"):
        describe_mesh(8)
    for given in ("8", 8.0, b"88"):
        with pytest.raises(TypeError, match=f"ranks_per_node={given!r}; expected a number, or"):
            describe_mesh(tp.RankLayout(16), ranks_per_node=given)
