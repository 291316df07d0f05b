import itertools
import re

import pytest
import torch.distributed as dist
from on_ranks import on_ranks

import ezpz_tp as tp
from ezpz_tp import layouts

# For each layout the axes of its mesh, the slowest first, and along each the groups.
ALL8 = [tuple(range(8))]
PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]
QUADS = [(0, 1, 2, 3), (4, 5, 6, 7)]
HALVES = [(0, 4), (1, 5), (2, 6), (3, 7)]
BY_TWO = [(0, 2), (1, 3), (4, 6), (5, 7)]
EXAMPLES = {
    **{name: ({}, {name: ALL8}) for name in ("dp", "tp", "cp", "pp", "ep")},
    "fsdp": ({}, {"shard": ALL8}),
    "hsdp": ({"shard": 4}, {"replicate": HALVES, "shard": QUADS}),
    "tp+sp": ({}, {"tp": ALL8}),
    "dp+ep": ({"ep": 2}, {"dp": [(0, 2, 4, 6), (1, 3, 5, 7)], "ep": PAIRS}),
    "fsdp+tp": ({"tp": 4}, {"shard": HALVES, "tp": QUADS}),
    "hsdp+tp": ({"shard": 2, "tp": 2}, {"replicate": HALVES, "shard": BY_TWO, "tp": PAIRS}),
    "dp+tp+pp": ({"tp": 2, "pp": 2}, {"pp": HALVES, "dp": BY_TWO, "tp": PAIRS}),
    "fsdp+tp+cp+pp": (
        {"tp": 2, "cp": 2, "pp": 2},
        {
            "pp": [(rank, rank + 8) for rank in range(8)],
            "shard": [(r, r + 4) for r in (0, 1, 2, 3, 8, 9, 10, 11)],
            "cp": [(r, r + 2) for r in (0, 1, 4, 5, 8, 9, 12, 13)],
            "tp": [(r, r + 1) for r in range(0, 16, 2)],
        },
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_groups_of_an_example_and_what_it_shards_and_sends(name):
    degrees, mesh = EXAMPLES[name]
    layout = layouts.named(name, sum(map(len, next(iter(mesh.values())))), **degrees)
    per_node = layout.world_size if layout.degree("tp") > 4 else 4
    description = layout.describe(ranks_per_node=per_node)
    assert [axis for axis, _ in layout.mesh_axes()] == list(mesh)
    for axis, groups in mesh.items():
        assert description.groups(axis) == groups
        assert layout.degree(axis) == len(groups[0])
    assert all(axis in str(description) for axis in mesh)
    text = str(layout)
    assert text.startswith(f"{name}: {layout.world_size} ranks, ")
    assert max(map(len, text.splitlines())) <= 100
    assert layout.when.split()[0] in text
    for axis, degree in layout.mesh_axes():
        assert re.search(rf"^{axis} {degree} shards \w+", text, re.MULTILINE)
    sent = re.findall(r"^  (forward|backward|after backward): ", text, re.MULTILINE)
    assert len(sent) >= len(layout.axes)
    assert text.count("arXiv:") >= len(layout.axes)


def test_every_combination_is_one_mesh_of_both_kinds():
    """Axes have the same groups as in our layout; those of the batch are its data axis."""
    batch, tried = {"replicate", "dp", "shard", "ep"}, 0
    ours = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}
    named = {"fsdp": ["shard"], "hsdp": ["replicate", "shard"]}
    parts = (("", "dp", "fsdp", "hsdp"), ("", "tp"), ("", "cp"), ("", "ep"), ("", "pp"))
    for words in itertools.product(*parts):
        if not any(words) or {"cp", "ep"} <= set(words):
            continue
        axes = [axis for word in filter(None, words) for axis in named.get(word, [word])]
        count = len(axes)
        layout = layouts.named("+".join(filter(None, words)), 2**count, **dict.fromkeys(axes, 2))
        theirs, mine = layout.describe(ranks_per_node=2**count), layout.rank_layout()
        assert dict(layout.mesh_axes()) == dict.fromkeys(axes, 2)
        for axis in ours.keys() & set(axes):
            assert theirs.groups(axis) == mine.groups(ours[axis])
        assert mine.degree("data") == 2 ** len(batch & set(axes))
        for group in mine.groups("data"):
            for axis in set(axes) - batch:
                inside = next(g for g in theirs.groups(axis) if group[0] in g)
                assert len(set(inside) & set(group)) == 1
        tried += 1
    assert tried == 47


def test_names_are_forgiving():
    assert set(EXAMPLES) == set(layouts.names())
    plain = layouts.named("fsdp+tp+sp", 16, tp=4)
    for name in ("tp_sp_fsdp", "FSDP+TP+SP", "sp tp-fsdp"):
        assert layouts.named(name, 16, tp=4) == plain
    assert layouts.named("ddp", 4).name == "dp"
    assert layouts.named("ep+dp", 4, ep=2).name == "dp+ep"
    assert plain.when == ""
    assert "activations" in plain.axes[-1].shards
    assert layouts.named("hsdp", 8, replicate=2).mesh_axes() == (("replicate", 2), ("shard", 4))
    assert layouts.named("dp+tp", 1, tp=1).mesh_axes() == (("dp", 1), ("tp", 1))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hspd", r"'hspd' is none of its parts dp, .*; known are dp, fsdp, .* mean 'hsdp'\?"),
        ("quantum", r"layout 'quantum': .* known are dp.*fsdp\+tp\+cp\+pp$"),
        ("", r"layout '': '' is none of its parts"),
        ("tp+tp", "a part is named twice"),
        ("dp+ddp", "a part is named twice"),
        ("dp+fsdp", "expected one of dp, fsdp, hsdp; hsdp is fsdp within dp"),
        ("cp+sp", r"sp splits the sequence over the ranks of tp; write tp\+sp"),
        ("cp+ep", "experts lie over the ranks of cp too"),
    ],
)
def test_names_that_are_none(name, said):
    with pytest.raises(ValueError, match=said):
        layouts.named(name, 8)


@pytest.mark.parametrize(
    ("name", "world", "degrees", "said"),
    [
        ("hsdp", 8, {}, r"hsdp on 8 ranks: give all but one of replicate, shard, as in named\("),
        ("fsdp", 8, {"tp": 2}, "tp=2 for fsdp; its axes are shard"),
        ("fsdp+tp", 8, {"tp": 3}, "^tp 3 does not divide the world size 8$"),
        ("dp+tp+pp", 8, {"tp": 2, "pp": 3}, "tp 2 x pp 3 = 6 does not divide the world size 8"),
        ("dp+tp", 8, {"tp": 2, "dp": 2}, "tp 2 x dp 2 = 4 is not the world size 8$"),
        ("tp+cp", 8, {"tp": 2, "cp": 2}, r"= 4 is not the world size 8; dp\+tp\+cp puts what is"),
        ("fsdp", 8, {"shard": 2}, r"^shard 2 is not the world size 8; hsdp repeats it over what"),
        ("tp+fsdp", 8, {"shard": 2, "tp": 2}, r"2 x tp 2 = 4 is not .* 8; hsdp\+tp repeats it"),
        ("tp", 8, {"tp": 4}, r"^tp 4 is not the world size 8; dp\+tp puts what is left into data"),
        ("tp", 4, {"tp": 8}, "^tp 8 does not divide the world size 4"),
        ("tp", 8, {"tp": 0}, "tp=0 for tp; expected at least 1"),
        ("tp", 0, {}, "world_size=0 for tp; expected at least 1"),
    ],
)
def test_degrees_that_do_not_fit(name, world, degrees, said):
    with pytest.raises(tp.DegreeError, match=said):
        layouts.named(name, world, **degrees)


def test_a_tp_axis_across_nodes_is_warned_of():
    with pytest.warns(UserWarning, match="1 of 1 tp groups cross nodes") as caught:
        layouts.named("tp", 8).describe(ranks_per_node=4)
    assert caught[0].filename == __file__


def test_before_there_is_a_world():
    layout = layouts.named("fsdp", 2)
    for use in (lambda: layout.to_mesh("cpu"), layout.initialize):
        with pytest.raises(tp.NotInitializedError, match=r"layout fsdp .*init_process_group"):
            use()


def groups_of_a_mesh(name, degrees):
    layout = layouts.named(name, dist.get_world_size(), **degrees)
    mesh = layout.to_mesh("cpu")
    assert dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) == dict(layout.mesh_axes())
    for axis, _ in layout.mesh_axes():
        group = tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
        assert group in layout.describe(ranks_per_node=4).groups(axis)
        assert dist.get_rank() in group


def groups_of_a_state(name, degrees):
    """The groups are the layout's; what is trained with them: test_four_dimensions."""
    layout = layouts.named(name, dist.get_world_size(), **degrees)
    state = layout.initialize()
    assert state is tp.get_state()
    assert state.layout == layout.rank_layout()
    for axis in tp.AXES:
        group = tuple(dist.get_process_group_ranks(state.group(axis)))
        assert group == layout.rank_layout().group_of(axis, dist.get_rank())
    tp.destroy_tensor_parallel()


@on_ranks(4, in_processes=True, initialize=False)
def test_a_mesh_and_a_state_have_the_groups_of_the_layout():
    groups_of_a_mesh("fsdp", {})
    groups_of_a_mesh("hsdp", {"shard": 2})
    groups_of_a_state("tp+sp", {})
    groups_of_a_state("dp+tp", {"tp": 2})
    groups_of_a_state("tp+pp", {"tp": 2})
    with pytest.raises(tp.DegreeError, match=r"for 8 ranks and the world has 4; .*world_size=4"):
        layouts.named("fsdp", 8).to_mesh("cpu")
    with pytest.raises(tp.DegreeError, match="for 2 ranks and the world has 4"):
        layouts.named("tp", 2).initialize()
