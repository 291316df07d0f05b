"""What ezpz_topo makes of a nodelist is what ``scontrol show hostnames`` makes of it."""

import random

from ezpz_topo import expand_nodelist

LISTS = 200


def a_range(draw):
    width = draw.choice((1, 1, 2, 3))
    low = draw.randint(0, 30)
    high = low + draw.randint(0, 12)
    return f"{low:0{width}d}" if low == high else f"{low:0{width}d}-{high}"


def a_name(draw):
    # This Slurm takes no text after a bracket, unless another bracket follows.
    brackets = draw.choice((0, 1, 1, 1, 2, 2, 3, 4))
    name = draw.choice(("n", "nid", "x1000c", "a-b", "login7"))
    for _ in range(brackets):
        inside = ",".join(a_range(draw) for _ in range(draw.randint(1, 2 if brackets > 2 else 3)))
        name += f"[{inside}]" if name.endswith(tuple("abcdin-sx")) else f"s[{inside}]"
        name += draw.choice("bcs") if brackets > 1 else ""
    return name.rstrip("bcs") if brackets else name


def test_lists_of_many_kinds(slurm):
    draw = random.Random(22_05_8)  # the same lists each time
    lists = [
        draw.choice((",", ",,", " ")).join(a_name(draw) for _ in range(draw.randint(1, 4)))
        for _ in range(LISTS)
    ]
    assert sum(text.count("[") > 2 for text in lists) > LISTS // 4, "order matters from three on"
    each = 'for list; do scontrol show hostnames "$list" | tr "\\n" " "; echo; done'
    said = slurm.run(["sh", "-c", each, "sh", *lists]).stdout
    assert [expand_nodelist(text) for text in lists] == [line.split() for line in said.splitlines()]
