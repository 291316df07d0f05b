import itertools

import pytest

import ezpz_tp as tp


def test_order_is_tensor_context_data_pipeline():
    layout = tp.RankLayout(16, tensor=2, context=2, pipeline=2)
    assert [layout.stride(axis) for axis in tp.AXES] == [1, 2, 4, 8]


def test_what_does_not_exist():
    with pytest.raises(ValueError, match="axis 'sequence'; expected one of tensor"):
        tp.RankLayout(4).groups("sequence")
    with pytest.raises(ValueError, match="expert and tensor lie on different grids"):
        tp.RankLayout(4).group_of(("expert", "tensor"), 0)
    with pytest.raises(ValueError, match="one is named twice"):
        tp.RankLayout(4).degree(("tensor", "tensor"))
    with pytest.raises(ValueError, match="rank 4; expected 0 to 3"):
        tp.RankLayout(4).group_of("data", 4)


def by_coordinates(layout, axes, rank, words):
    """The definition: the ranks that differ in these coordinates only."""
    tokens = [token for token in layout.order.split("-") if token in words]
    tokens += [token for token in words if token not in tokens]
    sizes = [range(layout.degree(words[token])) for token in reversed(tokens)]
    places = list(itertools.product(*sizes))  # the last, which is the first token, varies fastest
    kept = [i for i, token in enumerate(reversed(tokens)) if words[token] not in axes]
    return tuple(
        other
        for other, place in enumerate(places)
        if all(place[i] == places[rank][i] for i in kept)
    )


MODEL = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
EXPERT = {"tp": "expert_tensor", "ep": "expert", "dp": "expert_data", "pp": "pipeline"}


@pytest.mark.parametrize(
    "layout",
    [
        tp.RankLayout(24, 2, 3, 2),
        tp.RankLayout(24, 2, 3, 2, order="tp-cp-pp-dp"),
        tp.RankLayout(24, 2, 3, 2, order="pp-dp-cp-tp"),
        tp.RankLayout(32, 4, 2, 2, expert=4, expert_tensor=1),
        tp.RankLayout(16, 2, expert=4, expert_tensor=1),  # Megatron's documented groups
        tp.RankLayout(32, 2, 2, 2, expert=2, order="tp-cp-ep-dp-pp"),
        tp.RankLayout(16, 2, 1, 2, expert=2, expert_tensor=1, order="tp-ep-pp-dp"),
    ],
    ids=str,
)
def test_any_order_and_any_axes_follow_the_definition(layout):
    for words in (MODEL, EXPERT) if layout.experts_fit else (MODEL,):
        names = list(words.values())
        for count in range(1, 5):
            for axes in itertools.combinations(names, count):
                if set(axes) == {"pipeline"} and words is EXPERT:
                    continue
                groups = set()
                for rank in range(layout.world_size):
                    group = by_coordinates(layout, axes, rank, words)
                    assert layout.group_of(axes, rank) == group
                    assert layout.index(axes, rank) == group.index(rank)
                    assert layout.degree(axes) == len(group)
                    groups.add(group)
                assert layout.groups(axes) == sorted(groups)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor": 3}, "tensor 3 x context 1 x pipeline 2 = 6 .* size 16"),
        *(({name: 0}, "expected at least 1") for name in ("world_size", "tensor", "pipeline")),
        ({"order": "tp-dp-dp-pp"}, "expected each of"),
        ({"order": "tp-xp"}, "expected each of"),
        ({"order": "tp-cp-ep-pp"}, "does not say where dp goes, and the degree of data is 4"),
        ({"expert": 3}, r"expert_tensor 2 x expert 3 x pipeline 2 = 12 does not divide .* 16"),
        (
            {"order": "tp-cp-ep-pp-dp", "expert": 2},
            "at different distances; put pp last, or let expert_data 2 equal data 4",
        ),
    ],
)
def test_degrees_orders_and_experts_that_do_not_fit(arguments, message):
    with pytest.raises(tp.DegreeError, match=message):
        tp.RankLayout(**{"world_size": 16, "tensor": 2, "pipeline": 2, **arguments})
