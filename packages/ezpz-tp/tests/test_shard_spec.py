"""What each rank holds of a full tensor, and how parameters say it."""

import pytest
import torch
from torch import nn

import ezpz_tp as tp
from ezpz_tp import ColumnParallelLinear, DegreeError, Piece, RowParallelLinear
from ezpz_tp._shard import Shard, set_shard, shard_of
from ezpz_tp.testing import assert_matches_unsharded, run_ranks

SHARDS = [
    Shard((24, 3), 0),
    Shard((3, 24, 2), 1),
    Shard((3, 24), -1),
    Shard((24,), 0, blocks=(12, 12)),
    Shard((5, 24), 1, blocks=(16, 4, 4)),
    Shard((48, 2), 0, blocks=(24, 0, 24)),
    Shard((13, 2), 0, padded=True),
    Shard((2, 3), 0, padded=True),
    Shard((0, 3), 0, padded=True),
]


def part_of(full, shard, index, degree):
    """The same from torch's own functions: chunks of each block, then zeros up to the size."""
    blocks = full.split(shard.blocks, shard.dim) if shard.blocks else [full]
    none = full.narrow(shard.dim, 0, 0)
    part = torch.cat(
        [(*b.chunk(degree, shard.dim), *[none] * degree)[index] for b in blocks], shard.dim
    )
    missing = -(-full.shape[shard.dim] // degree) - part.shape[shard.dim]
    padding = list(full.shape)
    padding[shard.dim] = missing
    return torch.cat([part, torch.zeros(padding, dtype=full.dtype)], shard.dim)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("shard", SHARDS, ids=repr)
def test_pieces_are_the_chunks_of_each_block(shard, degree):
    full = torch.arange(1, 1 + torch.Size(shard.full_shape).numel()).view(shard.full_shape)
    joined = torch.zeros_like(full)
    for index in range(degree):
        part = torch.zeros(shard.local_shape(index, degree), dtype=full.dtype)
        for local, start, length in shard.pieces(index, degree):
            assert length > 0
            piece = full.narrow(shard.dim, start, length)
            part.narrow(shard.dim, local, length).copy_(piece)
            joined.narrow(shard.dim, start, length).add_(piece)
        assert torch.equal(part, part_of(full, shard, index, degree))
        for local, box in shard.boxes(index, degree):
            assert torch.equal(part[local.slices], full[box.slices])
        low = Piece((0,) * full.dim(), tuple((size + 1) // 2 for size in part.shape))
        for local, box in shard.boxes(index, degree, low):  # of less than all
            assert local.overlap(low) == local
            assert torch.equal(part[local.slices], full[box.slices])
    assert torch.equal(joined, full)  # each element once


def test_what_is_not_split_is_one_piece_everywhere():
    assert Shard((4,), 0, blocks=(4,)) == Shard([4], -1)  # one block is none
    for shape in ((), (3,), (2, 0, 5)):
        assert Shard(shape).local_shape(3, 4) == shape
        assert Shard(shape).pieces(3, 4) == ((0, 0, shape[0] if shape else 1),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shard((4, 4), 2), r"dim 2 of a tensor of shape \(4, 4\); expected 0 to 1"),
        (lambda: Shard((4, 4), blocks=(4,)), "give the dim"),
        (lambda: Shard((4,), 0, (2, 1)), r"blocks \(2, 1\) add up to 3; expected 4, dim 0"),
        (lambda: Shard((4,), 0, (2, 2), padded=True), "cannot be padded"),
        (lambda: Shard((6, 4), 0).local_shape(0, 4), r"\(6, 4\) does not divide: 6 over degree 4"),
        (
            lambda: Shard((12,), 0, (8, 2, 2)).pieces(0, 4),
            r"stacked of \(8, 2, 2\), does not divide: 2 over degree 4; .* divides 2",
        ),
        (lambda: Shard((4,), 0).pieces(2, 2), "rank 2 of degree 2; expected 0 to 1"),
        (lambda: Shard((4,), 0).local_shape(0, 0), "rank 0 of degree 0"),
    ],
)
def test_what_does_not_fit_is_said(make, message):
    with pytest.raises(DegreeError, match=message):
        make()


def layers():
    return nn.ModuleDict(
        {
            "column": ColumnParallelLinear(4, 8, seed=1),
            "glu": ColumnParallelLinear(4, 16, stride=2, seed=2),
            "qkv": ColumnParallelLinear(4, 16, stride=(8, 4, 4), seed=3),
            "row": RowParallelLinear(8, 4, stride=(4, 2, 2), seed=4),
            "head": ColumnParallelLinear(4, 13, pad_output=True, seed=5),
            "rows": tp.VocabParallelEmbedding(13, 4, seed=6),
            "columns": tp.ParallelEmbedding(13, 4, seed=7),
            "norm": nn.LayerNorm(4),
        }
    )


EXPECTED = {
    "column.weight": Shard((8, 4), 0),
    "column.bias": Shard((8,), 0),
    "glu.weight": Shard((16, 4), 0, blocks=(8, 8)),
    "glu.bias": Shard((16,), 0, blocks=(8, 8)),
    "qkv.weight": Shard((16, 4), 0, blocks=(8, 4, 4)),
    "qkv.bias": Shard((16,), 0, blocks=(8, 4, 4)),
    "row.weight": Shard((4, 8), 1, blocks=(4, 2, 2)),
    "row.bias": Shard((4,)),
    "head.weight": Shard((13, 4), 0, padded=True),
    "head.bias": Shard((13,), 0, padded=True),
    "rows.weight": Shard((13, 4), 0, padded=True),
    "columns.weight": Shard((13, 4), 1),
    "norm.weight": Shard((4,)),
    "norm.bias": Shard((4,)),
}


def said(module):
    return {name: shard_of(parameter) for name, parameter in module.named_parameters()}


def every_layer():
    module = layers()
    assert said(module) == EXPECTED
    for name, parameter in module.named_parameters():
        degree = module["column"].tp_size
        assert parameter.shape == shard_of(parameter).local_shape(0, degree), name
    master = nn.Parameter(module["qkv"].weight.float())
    tp.copy_tensor_model_parallel_attributes(master, module["qkv"].weight)
    assert shard_of(master) == EXPECTED["qkv.weight"]


@pytest.mark.parametrize("degree", [1, 2])
def test_every_parameter_of_every_layer_says_what_it_is_a_part_of(degree):
    run_ranks(every_layer, degree)


def test_megatron_attributes_alone_are_understood_with_a_degree():
    parameter = nn.Parameter(torch.zeros(4, 6))
    tp.set_tensor_model_parallel_attributes(parameter, True, 1, 2)
    assert shard_of(parameter) is None
    assert shard_of(parameter, 4) == Shard((4, 24), 1, blocks=(12, 12))
    whole = nn.Parameter(torch.zeros(4, 6))
    tp.set_tensor_model_parallel_attributes(whole, False, 1, 1)
    assert shard_of(whole) == Shard((4, 6), 1)
    odd = nn.Parameter(torch.zeros(4, 3))
    tp.set_tensor_model_parallel_attributes(odd, True, 1, 4)
    with pytest.raises(DegreeError, match=r"partition_stride 4, which does not divide 6"):
        shard_of(odd, 2)


def test_of_a_parameter_of_ones_own_it_can_be_said():
    parameter = nn.Parameter(torch.zeros(8, 4))
    set_shard(parameter, Shard((16, 4), 0, blocks=(8, 4, 4)))
    assert shard_of(parameter) == Shard((16, 4), 0, blocks=(8, 4, 4))
    found = parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride
    assert found == (True, 0, 3)
    set_shard(parameter, Shard((8, 4), 0))
    assert not parameter.tensor_model_parallel
    set_shard(parameter, Shard((8, 4), 0, padded=True), degree=1)
    for shard, degree in ((Shard((16, 5), 0), None), (Shard((8, 4, 1), 0), None)):
        with pytest.raises(DegreeError, match=r"shape \(8, 4\) is no part of Shard"):
            set_shard(parameter, shard, degree)
    with pytest.raises(DegreeError, match=r"at degree 4; expected \(4, 4\)"):
        set_shard(parameter, Shard((16, 4), 0), 4)


class Grouped(nn.Module):
    """Two queries for each key and value, of one product: as in grouped-query attention."""

    def __init__(self, qkv, out):
        super().__init__()
        self.qkv, self.out = qkv, out

    def forward(self, input_):
        each = self.qkv.weight.shape[0] // 4
        query, key, value = self.qkv(input_).split([2 * each, each, each], -1)
        query = query.unflatten(-1, (-1, 2, 2))  # key's heads, queries for each, size of a head
        key, value = (part.unflatten(-1, (-1, 1, 2)) for part in (key, value))
        return self.out((query * key + value).flatten(-3))


def test_a_fused_projection_computes_what_the_unsharded_one_does():
    def parallel():
        qkv = ColumnParallelLinear(4, 32, stride=(16, 8, 8), gather_output=False)
        return Grouped(qkv, RowParallelLinear(16, 4, input_is_parallel=True))

    def ordinary():
        return Grouped(nn.Linear(4, 32), nn.Linear(16, 4))

    assert_matches_unsharded(parallel, ordinary, torch.ones(3, 4), tensor=[1, 2, 4])


def test_sizes_of_matrices_that_do_not_fit_are_said():
    with pytest.raises(DegreeError, match=r"stride=\(8, 4\) adds up to 12; .* out_features=16"):
        ColumnParallelLinear(4, 16, stride=(8, 4))

    def uneven():
        with pytest.raises(DegreeError, match=r"out_features, stride\[1\]=6 is not divisible .* 4"):
            ColumnParallelLinear(4, 20, stride=(8, 6, 6))

    run_ranks(uneven, 4)
