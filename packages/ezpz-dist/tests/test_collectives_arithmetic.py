"""The arithmetic that every rank does alike, without ranks."""

import math

import pytest
import torch

from ezpz_dist._values import Flat, combine, combine_packed, pack


def test_sums_are_exact_whatever_the_order():
    assert combine([1e100, 1.0, -1e100], "sum") == 1.0
    assert combine([0.1] * 10, "sum") == 1.0
    assert combine([1e308, 1e308, -1e308], "sum") == 1e308
    assert combine([1e308, 1e308], "mean") == 1e308
    assert combine([1e308, 1e308], "sum") == math.inf
    assert combine([math.inf, 1.0], "sum") == math.inf
    assert math.isnan(combine([math.inf, -math.inf], "sum"))
    assert combine([(1 << 63) - 1] * 3, "sum") == 3 * ((1 << 63) - 1)
    assert combine([(1 << 53) + 1, 0.5, 0.5], "sum") == float((1 << 53) + 2)
    assert combine([1 << 62] * 40 + [0.5], "product") == math.inf * 1


@pytest.mark.parametrize("op", ["min", "max"])
def test_extremes_of_ints_and_floats(op):
    assert type(combine([1, 1.0], op)) is float
    assert type(combine([1, 2], op)) is int
    assert math.isnan(combine([1.0, math.nan, 2], op))


def test_numbers_come_back_as_they_were_packed():
    numbers = [1, 2.5, -(1 << 63), (1 << 63) - 1, -0.0, math.inf, 5e-324]
    packed = pack(numbers)
    assert len(packed) == 9 * len(numbers)
    found = combine_packed([packed + b"rest"], len(numbers), "sum")
    assert [type(one) for one in found] == [type(one) for one in numbers]
    assert found == numbers
    rows = [pack([1, 2.5]), pack([1.5, 1])]
    assert combine_packed(rows, 2, "mean") == [1.25, 1.75]
    assert combine_packed(rows, 2, "max") == [1.5, 2.5]


def test_floats_of_a_dict_are_as_exact_as_one():
    rows = [[1e308, 0.1, math.inf], [1e308, 0.2, -math.inf], [-1e308, 0.3, 0.0]]
    for op in ("sum", "mean"):
        for count in (1, 2, 3):
            found = combine_packed([pack(row[:count]) for row in rows], count, op)
            expected = [combine(column, op) for column in list(zip(*rows, strict=True))[:count]]
            assert repr(found) == repr(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", ["min", "max"])
def test_floats_travel_in_their_order(dtype, op):
    tiny = torch.finfo(dtype).smallest_normal / 4  # subnormal
    ascending = [-math.inf, -1.5, -tiny, -0.0, 0.0, tiny, 1.5, math.inf]
    values = torch.tensor(ascending, dtype=dtype)
    flat = Flat(dtype, [values], op)
    flat.load(torch.device("cpu"))
    assert not flat.data.is_floating_point()
    assert (flat.data.diff() > 0).all()
    (back,) = flat.results(1)
    assert torch.equal(back, values)
    assert torch.equal(back.signbit(), values.signbit())
    lost = Flat(dtype, [torch.tensor([math.nan, -math.nan], dtype=dtype)], op)
    lost.load(torch.device("cpu"))
    wins = lost.data < flat.data.min() if op == "min" else lost.data > flat.data.max()
    assert wins.all()
    assert lost.results(1)[0].isnan().all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_rows_are_combined_in_one_order(ranks):
    rows = torch.rand(ranks, 7)
    flats = []
    for row in rows:
        flat = Flat(torch.float32, [row], "sum")
        flats.append((flat, flat.load(torch.device("cpu")).raw()))
    every = [raw for _, raw in flats]
    for flat, _ in flats:
        flat.combine_rows(every)
    results = [flat.results(ranks)[0] for flat, _ in flats]
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.allclose(results[0], rows.sum(0))
