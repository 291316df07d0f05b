from itertools import pairwise

import pytest
import torch
from ranks import on_ranks

import ezpz_tp as tp
from ezpz_tp._mappings import vocabulary_range
from ezpz_tp.testing import counting


def test_the_last_dim_is_split_into_views():
    whole = torch.arange(24.0).view(2, 12)
    parts = tp.split_tensor_along_last_dim(whole, 3)
    assert [part.shape for part in parts] == [(2, 4)] * 3
    assert torch.equal(torch.cat(parts, -1), whole)
    assert all(part.untyped_storage().data_ptr() == whole.data_ptr() for part in parts)


def test_contiguous_parts_have_memory_of_their_own():
    whole = torch.arange(24.0).view(2, 12)
    for part in tp.split_tensor_along_last_dim(whole, 3, contiguous_split_chunks=True):
        assert part.is_contiguous()
        part.zero_()
    assert whole.count_nonzero() == 23


@pytest.mark.parametrize("shape", [(2, 10), ()])
def test_a_last_dim_that_does_not_split_is_told(shape):
    with pytest.raises(tp.DegreeError, match=r"\(.*\) does not split into 3 equal parts"):
        tp.split_tensor_along_last_dim(torch.zeros(shape), 3)


def test_division_without_remainder():
    tp.ensure_divisibility(12, 4)
    assert tp.divide_and_check_no_remainder(12, 4) == 3
    with pytest.raises(tp.DegreeError, match="13 is not divisible by 4"):
        tp.divide_and_check_no_remainder(13, 4)


@pytest.mark.parametrize("new_buffer", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@on_ranks(3)
def test_chunks_of_all_ranks_join_to_the_whole(new_buffer, transposed):
    whole, start = torch.arange(24.0).view(4, 6), 8 * tp.get_tensor_parallel_rank()
    whole = whole.t() if transposed else whole
    part = tp.split_tensor_into_1d_equal_chunks(whole, new_buffer)
    shares = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert shares is not (new_buffer or transposed)
    assert torch.equal(part, whole.reshape(-1)[start : start + 8])
    with counting() as counter:
        assert torch.equal(tp.gather_split_1d_tensor(part), whole.reshape(-1))
    assert counter == {"all_gather": 1}


@on_ranks(3)
def test_elements_are_never_left_out():
    with pytest.raises(tp.DegreeError, match="10 elements, which 3 tensor-parallel ranks"):
        tp.split_tensor_into_1d_equal_chunks(torch.zeros(2, 5))


def test_alone_a_chunk_is_the_whole():
    whole = torch.arange(6.0).view(2, 3)
    part = tp.split_tensor_into_1d_equal_chunks(whole)
    assert torch.equal(tp.gather_split_1d_tensor(part), whole.view(-1))
    assert (
        tp.split_tensor_into_1d_equal_chunks(whole, new_buffer=True).data_ptr() != whole.data_ptr()
    )


@pytest.mark.parametrize("size", [1, 2, 5, 8, 10, 50257])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_every_id_is_in_one_range(size, degree):
    ranges = [vocabulary_range(size, rank, degree) for rank in range(degree)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    rows = -(-size // degree)
    assert all(last - first in {rows, max(0, size - first)} for first, last in ranges)


def test_vocab_utility():
    assert tp.VocabUtility.vocab_range_from_global_vocab_size(12, 1, 3) == (4, 8)
    assert tp.VocabUtility.vocab_range_from_global_vocab_size(10, 2, 3) == (8, 10)
    assert tp.VocabUtility.vocab_range_from_per_partition_vocab_size(4, 2, 3) == (8, 12)
