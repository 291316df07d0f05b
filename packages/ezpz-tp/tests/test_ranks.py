import itertools

import pytest

from ezpz_tp import AXES, RankLayout


def test_the_seeds_picture_sixteen_ranks_with_tensor_degree_two():
    layout = RankLayout(16, tensor=2)
    assert layout.data == 8
    assert layout.groups("tensor")[0] == (0, 1)
    assert len(layout.groups("tensor")) == 8
    assert layout.groups("data") == [tuple(range(0, 16, 2)), tuple(range(1, 16, 2))]


def test_order_is_tensor_context_data_pipeline():
    layout = RankLayout(16, tensor=2, context=2, pipeline=2)
    assert [layout.stride(axis) for axis in AXES] == [1, 2, 4, 8]
    assert layout.group_of("pipeline", 3) == (3, 11)
    assert layout.group_of("context", 3) == (1, 3)


LAYOUTS = [
    RankLayout(t * c * d * p, t, c, p)
    for t, c, d, p in itertools.product((1, 2, 3), (1, 2), (1, 3), (1, 2))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("axis", AXES)
def test_groups_of_an_axis_part_the_world(layout, axis):
    groups = layout.groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
    for group in groups:
        assert len(group) == layout.degree(axis)
        for position, rank in enumerate(group):
            assert layout.index(axis, rank) == position
            assert layout.group_of(axis, rank) == group


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_two_axes_meet_in_one_rank(layout):
    for first, second in itertools.combinations(AXES, 2):
        for one, other in itertools.product(layout.groups(first), layout.groups(second)):
            assert len(set(one) & set(other)) <= 1


def test_the_largest_machine():
    layout = RankLayout(120_960, tensor=12, context=2, pipeline=8)
    assert layout.data == 630
    assert layout.group_of("tensor", 120_959) == tuple(range(120_948, 120_960))
    assert layout.index("pipeline", 120_959) == 7


def test_degrees_that_do_not_divide_show_the_numbers():
    with pytest.raises(ValueError, match=r"tensor 3 x context 1 x pipeline 2 = 6 .* size 16"):
        RankLayout(16, tensor=3, pipeline=2)


@pytest.mark.parametrize(
    "arguments",
    [{"world_size": 0}, {"world_size": 4, "tensor": 0}, {"world_size": 4, "pipeline": -1}],
)
def test_degrees_below_one(arguments):
    with pytest.raises(ValueError, match="expected at least 1"):
        RankLayout(**arguments)


def test_what_does_not_exist():
    with pytest.raises(ValueError, match="axis 'expert'; expected one of tensor"):
        RankLayout(4).groups("expert")
    with pytest.raises(ValueError, match="rank 4; expected 0 to 3"):
        RankLayout(4).group_of("data", 4)
