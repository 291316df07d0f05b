"""What ezpz_topo makes of a nodelist is what ``scontrol show hostnames`` makes of it."""

import random

from ezpz_topo import expand_nodelist, fold_nodelist

LISTS = 500


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


def test_five_hundred_lists(slurm):
    draw = random.Random(22_05_8)  # the same lists each time
    lists = [
        draw.choice((",", ",,", " ")).join(a_name(draw) for _ in range(draw.randint(1, 4)))
        for _ in range(LISTS)
    ]
    assert sum(text.count("[") > 2 for text in lists) > LISTS // 4, "order matters from three on"
    for text in lists:
        said = slurm.run(["scontrol", "show", "hostnames", text]).stdout.split()
        assert expand_nodelist(text) == said, text


def test_what_we_fold_slurm_expands(slurm):
    draw = random.Random(1)
    for _ in range(100):
        hosts = [f"{draw.choice(('n', 'x0c'))}{draw.randint(0, 120)}" for _ in range(20)]
        said = slurm.run(["scontrol", "show", "hostnames", fold_nodelist(hosts)]).stdout.split()
        assert said == hosts
