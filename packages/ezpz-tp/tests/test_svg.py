import re
import xml.etree.ElementTree as ET

import pytest

import ezpz_tp as tp

NOWHERE = {}
S = "{http://www.w3.org/2000/svg}"


def texts(root, kind):
    return [text.text for text in root.iter(f"{S}text") if text.get("class") == kind]


def test_every_rank_is_drawn_with_its_tensor_group():
    layout = tp.RankLayout(16, tensor=2, context=2, pipeline=2)
    root = ET.fromstring(tp.describe(layout, ranks_per_node=4).svg())
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
        description = tp.describe(tp.RankLayout(8, tensor=4), hosts=["<a>", "b&c"] * 4)
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
    for layout in (
        tp.RankLayout(2),
        tp.RankLayout(97),
        tp.RankLayout(128, 2, 2, 2),
        tp.RankLayout(256, 16),
    ):
        svg = tp.describe(layout, environ=NOWHERE).svg()
        root = ET.fromstring(svg)
        width, height = (float(root.get(name)) for name in ("width", "height"))
        assert width <= 1000
        for rect in root.iter(f"{S}rect"):
            assert 0 < float(rect.get("x")) < width - float(rect.get("width"))
            assert 0 < float(rect.get("y")) < height - float(rect.get("height"))
        assert sorted(map(int, texts(root, "r"))) == list(range(layout.world_size))
        assert not list(root.iter(f"{S}path"))  # where nodes are not known there are no borders


def test_borders_are_closed():
    svg = tp.describe(tp.RankLayout(8), ranks_per_node=4).svg()
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


def test_a_hundred_thousand_ranks_are_small():
    svg = tp.describe(tp.RankLayout(120_960, tensor=12, pipeline=8), ranks_per_node=12).svg()
    root = ET.fromstring(svg)
    assert len(texts(root, "r")) <= 256
    assert any("of 120,960 ranks" in text for text in texts(root, None))
    assert len(svg) < 25_000


def test_notebooks_and_files(tmp_path):
    description = tp.describe(tp.RankLayout(4, tensor=2), ranks_per_node=2)
    assert description._repr_svg_() == description.svg()
    description.save(tmp_path / "mesh.svg")
    assert (tmp_path / "mesh.svg").read_text(encoding="utf-8") == description.svg()
    with pytest.raises(ValueError, match=r"mesh.png does not end in .svg"):
        description.save(tmp_path / "mesh.png")
    assert not (tmp_path / "mesh.png").exists()


def test_experts_are_drawn_too():
    layout = tp.RankLayout(8, tensor=2, expert=2)
    root = ET.fromstring(tp.describe(layout, ranks_per_node=8).svg())
    assert sorted(map(int, texts(root, "r"))) == sorted([*range(8), *range(8)])
    assert "experts: expert_tensor 2 x expert 2 x expert_data 2" in texts(root, None)
