"""Pictures of meshes, as text and as SVG."""

import itertools
import random
import re
import xml.etree.ElementTree as ET

import pytest
from on_ranks import on_ranks

import ezpz_tp as tp
from ezpz_tp._pictures import Terminal
from ezpz_tp.testing import counting

NOWHERE = {}  # an environment without LOCAL_WORLD_SIZE


def ranks_drawn(text):
    """Every number that stands between borders."""
    lines = [line for line in text.splitlines() if "│" in line and "─" not in line]
    return [int(n) for line in lines for n in re.findall(r"\d+", line[line.index("│") :])]


# Four axes on nodes of one size: docs/guides/four-dimensions.md, which is run.
def test_borders_follow_nodes_of_different_sizes_and_the_warning_has_the_remedy():
    said = (
        r"^1 of 4 tensor groups cross nodes, with ranks on up to 2: .*; choose a tensor degree "
        r"that divides the number of ranks of every node: 1 or 2$"
    )
    with pytest.warns(UserWarning, match=said) as caught:
        description = tp.describe_mesh(tp.RankLayout(16, tensor=4), ranks_per_node=[6, 6, 4])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert repr(description) == str(description) == (
        """\
16 ranks: tensor 4 x data 4, on 3 nodes of 6, 6 and 4

  tensor   0    1    2    3
         ┌ node 0 ───────────┐
  data 0 │  0    1    2    3 │
         │         ┌ node 1 ─┤
       1 │  4    5 │  6    7 │
         ├─────────┘         │
       2 │  8    9   10   11 │
         ├ node 2 ───────────┤
       3 │ 12   13   14   15 │
         └───────────────────┘

axis    degree  groups  of rank 0  cross nodes  most nodes
tensor       4       4  0 1 2 3              1           2
data         4       4  0 4 8 12           all           3
Warning: 1 of 4 tensor groups cross nodes, with ranks on up to 2: the
  collectives of every layer leave the node; choose a tensor degree that divides
  the number of ranks of every node: 1 or 2."""
    )  # fmt: skip
    with pytest.warns(UserWarning, match="of every node: 1, 2, 3 or 6$"):
        tp.describe_mesh(tp.RankLayout(12, tensor=4), ranks_per_node=6)
    layout = tp.RankLayout(8, tensor=2, order="dp-tp")
    with pytest.warns(UserWarning, match=r"let tensor vary fastest \(order='tp-cp-ep-dp-pp'\)$"):
        tp.describe_mesh(layout, ranks_per_node=4)
    with pytest.warns(UserWarning, match=r"vary fastest .*; choose .* every node: 1$"):
        tp.describe_mesh(layout, ranks_per_node=1)


def test_ranks_placed_node_after_node_in_turn():
    with pytest.warns(UserWarning, match=r"4 of 4 tensor groups .*srun --distribution=block"):
        description = tp.describe_mesh(tp.RankLayout(8, tensor=2), hosts=["red", "blue"] * 4)
    text = str(description)
    assert "on 2 nodes of 4, not numbered node by node" in text
    assert "│  0 │  1 │" in text
    assert "Nodes: 0 red, 1 blue" in text
    assert ranks_drawn(text) == list(range(8))


def test_experts_have_a_picture_of_their_own():
    layout = tp.RankLayout(16, tensor=2, expert=4)
    description = tp.describe_mesh(layout, ranks_per_node=8)
    text = str(description)
    title = "experts: expert_tensor 2 x expert 4 x expert_data 2"
    model, experts = text.split(f"{title}\n")
    root = ET.fromstring(description.svg())
    assert sorted(map(int, texts(root, "r"))) == sorted([*range(16), *range(16)])
    assert title in texts(root, None)
    assert ranks_drawn(model) == list(range(16))
    assert sorted(ranks_drawn(experts)) == list(range(16))
    assert "       expert 0 │  0    1 │  │  8    9 │" in experts
    assert re.search(r"expert +4 +4  0 2 4 6 +none +1", experts)
    with pytest.warns(UserWarning, match="4 of 4 expert_tensor groups cross nodes"):
        tp.describe_mesh(tp.RankLayout(16, expert_tensor=4, expert=2), ranks_per_node=2)
    layout = tp.RankLayout(16, tensor=2, pipeline=2, expert=2)  # whose pipelines are one row
    text = str(tp.describe_mesh(layout, ranks_per_node=8))
    table = text[text.index("\naxis") :].splitlines()
    axes = ["tensor", "data", "pipeline", "expert_tensor", "expert", "expert_data"]
    assert [line.split()[0] for line in table[2:]] == axes


WORLDS = (1, 2, 6, 16, 24, 96, 97, 128)


@pytest.mark.filterwarnings("ignore:.*tensor groups:UserWarning")
def test_every_rank_is_drawn_once_within_80_columns():
    tried = 0
    for world in WORLDS:
        divisors = [d for d in range(1, world + 1) if world % d == 0]
        for t, c, p in itertools.product(divisors, divisors[:4], divisors[:4]):
            if world % (t * c * p):
                continue
            tried += 1
            nodes = {"ranks_per_node": divisors[tried % len(divisors)]} if tried % 3 else {}
            layout = tp.RankLayout(world, t, c, p, order=("tp-cp-dp-pp", "pp-dp-tp-cp")[tried % 2])
            text = str(tp.describe_mesh(layout, environ=NOWHERE, **nodes))
            lines = text.splitlines()
            assert max(map(len, lines)) <= 80, text
            assert len(lines) <= (100 if nodes else 55), text
            if nodes:
                assert sorted(ranks_drawn(text)) == list(range(world)), (layout, nodes)
    assert tried > 200


def test_the_ranks_of_a_picture_are_where_its_labels_say():
    layout = tp.RankLayout(48, tensor=4, context=2, pipeline=2)
    description = tp.describe_mesh(layout, environ=NOWHERE)
    (grid,) = description.grids
    picture = Terminal(grid, None, 80).picture
    data = next(labels for labels in picture.block_columns if labels.axis == "data")
    for below, blocks in zip(picture.block_rows, picture.blocks, strict=True):
        for d, block in zip(data.positions, blocks, strict=True):
            for c, row in zip(picture.rows.positions, block, strict=True):
                for t, rank in zip(picture.columns.positions, row, strict=True):
                    assert layout.index("tensor", rank) == int(t)
                    assert layout.index("context", rank) == int(c)
                    whole = {"data": layout.index("data", rank)}
                    whole["pipeline"] = layout.index("pipeline", rank)
                    said = dict(word.split() for word in below.split(", ") if word)
                    folded = int(d.lstrip("+")) + int(said.pop("data", 0))
                    assert folded == whole["data"]
                    assert all(whole[axis] == int(n) for axis, n in said.items())


@pytest.mark.filterwarnings("ignore:.*groups cross nodes:UserWarning")
def test_groups_and_crossings_agree_with_counting():
    generator = random.Random(0)
    for _ in range(30):
        t, c, p, d = (generator.choice((1, 2, 3, 4)) for _ in range(4))
        layout = tp.RankLayout(t * c * p * d, t, c, p)
        hosts = [f"h{generator.randrange(3)}" for _ in range(layout.world_size)]
        even = [f"h{rank // d}" for rank in range(layout.world_size)]
        for names, how in ((hosts, {"hosts": hosts}), (even, {"ranks_per_node": d})):
            description = tp.describe_mesh(layout, **how)
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


def test_the_largest_machine_fits_a_screen():
    layout = tp.RankLayout(120_960, tensor=12, context=2, pipeline=8)
    description = tp.describe_mesh(layout, ranks_per_node=12)
    text, svg = str(description), description.svg()
    root = ET.fromstring(svg)
    assert len(texts(root, "r")) <= 256
    assert any("of 120,960 ranks" in text for text in texts(root, None))
    assert len(svg) < 25_000
    assert ranks_drawn(text) == list(range(48))
    assert "Drawn: 48 of 120,960 ranks. data 2 to 629: 24 more at each step; pipeline 1 to" in text
    assert "... 10,076 more nodes like these" in text
    assert re.search(r"context +2 +60,480  0 12 +all +2$", text, re.MULTILINE)
    assert re.search(r"pipeline +8 +15,120  0 15120 ... 105840 +all +8$", text, re.MULTILINE)
    assert len(text) < 2500
    assert len(text.splitlines()) < 40
    # What is said of the ranks that are not drawn is so.
    assert 24 * 5 in layout.group_of("data", 0)
    assert 15_120 * 3 in layout.group_of("pipeline", 0)
    text = str(tp.describe_mesh(tp.RankLayout(4096), ranks_per_node=32))
    assert "Drawn: 48 of 4,096 ranks. data 48 to 4,095: 1 more at each step." in text
    assert "nodes like these" not in text  # one and a half are drawn


def test_only_ascii():
    description = tp.describe_mesh(tp.RankLayout(8, tensor=2), ranks_per_node=4)
    plain = description.text(ascii_only=True)
    assert plain.isascii()
    assert "| 0    1 |" in plain.replace("  0 ", " 0 ")
    assert len(plain) == len(str(description))
    wide = tp.describe_mesh(tp.RankLayout(128, tensor=16), environ=NOWHERE).text(width=120)
    assert max(map(len, wide.splitlines())) > 80


def test_the_environment_tells_the_ranks_of_a_node(monkeypatch):
    layout = tp.RankLayout(8, tensor=2)
    text = str(tp.describe_mesh(layout, environ={"LOCAL_WORLD_SIZE": "4"}))
    assert "on 2 nodes of 4 (LOCAL_WORLD_SIZE)" in text
    assert "on 1 node of 8" in str(tp.describe_mesh(layout, ranks_per_node=8))
    torchrun = {"LOCAL_WORLD_SIZE": "4", "RANK": "5", "WORLD_SIZE": "8"}
    torchrun |= {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert "on 2 nodes of 4" in str(tp.describe_mesh(layout, environ=torchrun))
    assert "on 4 nodes of 4" in str(tp.describe_mesh(tp.RankLayout(16), environ=torchrun))  # a plan
    named = tp.describe_mesh(layout, hosts=["a", "b"], environ={"LOCAL_WORLD_SIZE": "4"})
    assert "Nodes: 0 a, 1 b" in str(named)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "on 4 nodes of 2 (LOCAL_WORLD_SIZE)" in str(tp.describe_mesh(layout))


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
    description = tp.describe_mesh(tp.RankLayout(8, tensor=2), environ=environ)
    text = str(description)
    assert why in text.replace("\n  ", " ")
    assert "give ranks_per_node=" in text.replace("\n  ", " ")
    assert "│" not in text
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
        tp.describe_mesh(tp.RankLayout(16), environ=NOWHERE, **how)


def test_many_nodes_are_named_in_part():
    text = str(tp.describe_mesh(tp.RankLayout(40), hosts=[f"nid{i:03}" for i in range(40)]))
    assert "15 nid015, ... 24 more" in text.replace("\n  ", " ")
    assert "on 6 nodes of 1 to 4" in str(
        tp.describe_mesh(tp.RankLayout(16), ranks_per_node=[4, 4, 4, 2, 1, 1])
    )


def test_one_rank():
    with pytest.raises(ValueError, match="axis 'tp'; expected one of tensor, context, data"):
        tp.describe_mesh(tp.RankLayout(1), environ=NOWHERE).groups("tp")
    assert str(tp.describe_mesh(tp.RankLayout(1), environ=NOWHERE)).split() == ["1", "rank", "0"]
    assert ranks_drawn(str(tp.describe_mesh(tp.RankLayout(1), ranks_per_node=1))) == [0]


@on_ranks(4, tensor=2)
def test_a_state_is_described_without_a_collective():
    state = tp.get_state()
    with counting() as sent:
        mine = tp.describe_mesh(ranks_per_node=2)
        assert str(mine) == str(tp.describe_mesh(state, ranks_per_node=2))
    assert not sent
    assert f"of rank {state.rank}" in str(mine)
    assert state.ranks("tensor") in mine.groups("tensor")
    line = re.search(r"^tensor .*$", str(mine)[-300:], re.MULTILINE)[0]
    assert line.split()[3:5] == [str(rank) for rank in state.ranks("tensor")]
    bare = tp.ParallelState.from_groups(tensor=state.group("tensor"), rank=state.rank)
    with pytest.raises(tp.ParallelError, match=r"without a layout.*layout=RankLayout\(...\)"):
        tp.describe_mesh(bare)


def test_what_cannot_be_described():
    with pytest.raises(tp.NotInitializedError, match="initialize_tensor_parallel"):
        tp.describe_mesh()
    with pytest.raises(TypeError, match=r"describe_mesh\(int\); expected a ParallelState or"):
        tp.describe_mesh(8)
    for given in ("8", 8.0, b"88"):
        with pytest.raises(TypeError, match=f"ranks_per_node={given!r}; expected a number, or"):
            tp.describe_mesh(tp.RankLayout(16), ranks_per_node=given)


S = "{http://www.w3.org/2000/svg}"


def texts(root, kind):
    return [text.text for text in root.iter(f"{S}text") if text.get("class") == kind]


def test_every_rank_is_drawn_with_its_tensor_group():
    layout = tp.RankLayout(16, tensor=2, context=2, pipeline=2)
    root = ET.fromstring(tp.describe_mesh(layout, ranks_per_node=4).svg())
    ranks, groups = texts(root, "r"), texts(root, "s")
    assert sorted(map(int, ranks)) == list(range(16))
    colors = [rect.get("fill") for rect in root.iter(f"{S}rect")]
    for rank, group, color in zip(map(int, ranks), map(int, groups), colors, strict=True):
        assert rank in layout.groups("tensor")[group]
        same = [c for r, c in zip(ranks, colors, strict=True) if int(r) // 2 == rank // 2]
        assert set(same) == {color}
    assert len(set(colors)) == 8
    assert {"node 0", "node 1", "node 2", "node 3"} <= set(texts(root, None))


def test_it_stands_alone_and_says_what_it_is():
    with pytest.warns(UserWarning, match="cross nodes"):
        description = tp.describe_mesh(tp.RankLayout(8, tensor=4), hosts=["<a>", "b&c"] * 4)
    svg = description.svg()
    root = ET.fromstring(svg)
    assert root.find(f"{S}title").text.startswith("8 ranks: tensor 4 x data 2, on 2 nodes of 4")
    assert root.get("aria-label") == root.find(f"{S}title").text
    assert "cross nodes" in root.find(f"{S}desc").text
    assert root.get("role") == "img"
    assert not re.search(r"<script|<image|href|url\(|@import", svg)
    # A dark desktop may show it on a light page: it brings its own background.
    light, dark = re.findall(r"\.ranks\{background:(#\w+)\}", svg)
    assert (light, dark) == ("#fff", "#0d1117")
    assert svg.index(dark) > svg.index("@media(prefers-color-scheme:dark)") > svg.index(light)
    # In a notebook its rules reach the whole page, so all of them are for it alone.
    style = root.find(f"{S}style").text.replace("@media(prefers-color-scheme:dark)", "")
    selectors = re.findall(r"([^{}]+)\{", style)
    assert all(s.split()[0] == ".ranks" for group in selectors for s in group.split(","))
    assert "Warning: 2 of 2 tensor groups cross nodes" in " ".join(filter(None, texts(root, None)))
    assert "Nodes: 0 <a>, 1 b&c" in texts(root, None)


def test_nothing_is_drawn_outside():
    for degrees in ((2,), (97,), (128, 2, 2, 2), (256, 16)):
        layout = tp.RankLayout(*degrees)
        root = ET.fromstring(tp.describe_mesh(layout, environ=NOWHERE).svg())
        width, height = (float(root.get(name)) for name in ("width", "height"))
        assert width <= 1000
        for rect in root.iter(f"{S}rect"):
            assert 0 < float(rect.get("x")) < width - float(rect.get("width"))
            assert 0 < float(rect.get("y")) < height - float(rect.get("height"))
        assert sorted(map(int, texts(root, "r"))) == list(range(layout.world_size))
        assert not list(root.iter(f"{S}path"))  # where nodes are not known there are no borders


def test_borders_are_closed():
    svg = tp.describe_mesh(tp.RankLayout(8), ranks_per_node=4).svg()
    (path,) = ET.fromstring(svg).iter(f"{S}path")
    lines = re.findall(r"M([\d.]+) ([\d.]+)([HV])([\d.]+)", path.get("d"))
    assert "".join(f"M{x} {y}{way}{to}" for x, y, way, to in lines) == path.get("d")
    ends = [(float(x), float(y)) for x, y, _, _ in lines]
    ends += [(float(to), float(y)) if way == "H" else (float(x), float(to))
             for x, y, way, to in lines]  # fmt: skip
    assert len(lines) >= 4
    assert all(ends.count(end) >= 2 or any(
        way == "V" and float(x) == end[0] and float(y) <= end[1] <= float(to)
        for x, y, way, to in lines) for end in ends)  # fmt: skip


def test_notebooks_and_files(tmp_path):
    description = tp.describe_mesh(tp.RankLayout(4, tensor=2), ranks_per_node=2)
    assert description._repr_svg_() == description.svg()
    description.save(tmp_path / "mesh.svg")
    assert (tmp_path / "mesh.svg").read_text(encoding="utf-8") == description.svg()
    with pytest.raises(ValueError, match=r"mesh.png does not end in .svg"):
        description.save(tmp_path / "mesh.png")
    assert not (tmp_path / "mesh.png").exists()
