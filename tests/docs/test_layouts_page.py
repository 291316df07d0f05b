"""The page on layouts: its table is the zoo, and its pictures are drawn so."""

import re
import warnings
from pathlib import Path

from ezpz_tp import RankLayout, layouts
from ezpz_tp._describe import describe

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "layouts.md").read_text(encoding="utf-8")


def test_the_table_is_the_zoo():
    rows = re.findall(r"^\| `(.*?)` \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(layouts.names())
    for name, mesh, when in rows:
        axes = mesh.split(", ")
        layout = layouts.named(name, 2 ** len(axes), **dict.fromkeys(axes, 2))
        assert [axis for axis, _ in layout.mesh_axes()] == axes
        assert layout.when == when


def test_the_pictures_are_drawn_so():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = {
            "layouts-nodes.svg": describe(RankLayout(16, 2, 2), ranks_per_node=8).svg(),
            "layouts-crossing.svg": describe(RankLayout(16, 4), ranks_per_node=[6, 6, 4]).svg(),
        }
    assert set(re.findall(r"\]\((.*?\.svg)\)", PAGE)) == set(drawn)
    for name, svg in drawn.items():
        assert (DOCS / name).read_text(encoding="utf-8") == svg
        assert len(svg) < 8 * 1024
