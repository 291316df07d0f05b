import pytest

from ezpz_dist import NotSetUpError, all_reduce, barrier, broadcast

pytest_n = pytest.mark.parametrize("n", [1, 2, 3])


@pytest_n
def test_every_collective_in_every_world(ranks, n):
    ranks(
        n,
        """
        import math
        from ezpz_dist._collectives.reduce import DTYPES, OPS
        rank, n = setup_torch(timeout=60), dist.get_world_size()
        total = n * (n + 1) // 2
        assert all_reduce(rank + 1) == total and type(all_reduce(rank + 1)) is int
        assert all_reduce(float(rank), "mean") == (n - 1) / 2
        assert all_reduce(rank, op="mean") == (n - 1) / 2
        assert (all_reduce(rank, "min"), all_reduce(rank, "max")) == (0, n - 1)
        assert all_reduce(2, "product") == 2 ** n
        assert all_reduce((1 << 63) - 1) == n * ((1 << 63) - 1), "nothing overflows"
        assert all_reduce(0 if rank == 0 else 0.5) == (n - 1) / 2, "an int here, a float there"
        assert type(all_reduce(0 if rank == 0 else 0.5)) is (int if n == 1 else float)
        nan = float("nan")
        for guilty in range(n):
            mine = nan if rank == guilty else 1.0
            for op in OPS:
                assert math.isnan(all_reduce(mine, op)), (op, guilty)
                assert all_reduce(torch.tensor([mine, 1.0]), op)[0].isnan(), (op, guilty)
                assert not all_reduce(torch.tensor([mine, 1.0]), op)[1].isnan(), (op, guilty)
        half = torch.full((2,), 40000.0, dtype=torch.float16)
        assert torch.equal(all_reduce(half, "mean"), half), "the sum would overflow"
        for dtype in DTYPES:
            assert all_reduce(torch.ones(2, dtype=dtype)).tolist() == [n, n]

        mine = torch.arange(6, dtype=torch.float32).view(2, 3).t() + rank
        kept = mine.clone()
        result = all_reduce(mine)
        assert torch.equal(mine, kept) and result.dtype == torch.float32
        assert torch.equal(result, n * torch.arange(6.0).view(2, 3).t() + n * (n - 1) / 2)
        assert torch.equal(all_reduce(torch.ones(2).expand(3, 2)), torch.full((3, 2), float(n)))
        leaf = torch.ones(2, requires_grad=True)
        assert not all_reduce(leaf, "mean").requires_grad

        assert broadcast({"rank": rank}, root=n - 1) == {"rank": n - 1}
        assert broadcast(None if rank else [1, "a"]) == [1, "a"]
        large = broadcast(bytes(range(256)) * 4096 if rank == 0 else None)
        assert large == bytes(range(256)) * 4096
        tensor = broadcast(torch.full((2,), float(rank)), root=n - 1)
        assert tensor.tolist() == [n - 1, n - 1]
        barrier()
        cleanup()
        """,
    )


@pytest_n
def test_before_set_up_no_local_answer_in_a_world_of_several(ranks, n):
    ranks(
        n,
        """
        n = int(os.environ.get("WORLD_SIZE", 1))
        calls = (barrier, lambda: all_reduce(1), lambda: broadcast(1),
                 lambda: wrap_model(torch.nn.Linear(1, 1)))
        for call in calls:
            try:
                call()
            except NotSetUpError as error:
                assert n > 1 and "before setup_torch()" in str(error)
            else:
                assert n == 1
        """,
    )


@pytest.mark.parametrize("bad", ["1", None, True, [1]])
def test_what_cannot_be_reduced(bad):
    with pytest.raises(TypeError, match="expected an int, a float or a tensor"):
        all_reduce(bad)


def test_unknown_operations_and_roots():
    import torch

    with pytest.raises(ValueError, match="op 'avg'; expected one of sum, mean"):
        all_reduce(1, "avg")
    with pytest.raises(ValueError, match=r"mean of a torch\.int64 tensor"):
        all_reduce(torch.ones(1, dtype=torch.int64), "mean")
    for refused in (torch.ones(1, dtype=torch.bool), torch.ones(1).to_sparse()):
        with pytest.raises(TypeError, match=r"expected a dense one of torch\.float16"):
            all_reduce(refused)
    with pytest.raises(ValueError, match=r"the max of a torch\.complex64"):
        all_reduce(torch.ones(1, dtype=torch.complex64), "max")
    with pytest.raises(ValueError, match="root 1; expected a rank from 0 to 0"):
        broadcast(1, root=1)


def test_in_one_process_without_set_up(clean_env, monkeypatch):
    monkeypatch.setattr("os.environ", clean_env)
    barrier()
    assert (all_reduce(2), broadcast("x")) == (2, "x")


def test_errors_have_one_root():
    from ezpz_dist import DistError, SetupError, WrapError

    assert all(issubclass(kind, DistError) for kind in (NotSetUpError, SetupError, WrapError))
