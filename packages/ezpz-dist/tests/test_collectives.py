"""Every collective in every world: the same body on one rank and on several real ones."""

import math

import pytest
import torch

from ezpz_dist import all_gather_object, all_reduce, barrier, broadcast, wrap_model
from ezpz_dist._collectives import combine, combine_packed, pack

pytest_n = pytest.mark.parametrize("n", [1, 3])


@pytest.mark.parametrize("n", [1, 2, 3])  # of two, rows are combined in one go
def test_numbers_tensors_and_dicts(ranks, n):
    script = """
        import collections, math
        from ezpz_dist._collectives import DTYPES, OPS
        rank, n = setup_torch(timeout=60), dist.get_world_size()
        total = n * (n + 1) // 2

        assert all_reduce(rank + 1) == total and type(all_reduce(rank + 1)) is int
        assert all_reduce(float(rank), "mean") == (n - 1) / 2 == all_reduce(rank, op="avg")
        assert (all_reduce(rank, "min"), all_reduce(rank, "max")) == (0, n - 1)
        assert all_reduce(2, "product") == 2 ** n
        assert all_reduce((1 << 63) - 1) == n * ((1 << 63) - 1), "nothing overflows"
        for op in ("sum", "max"):
            assert all_reduce(0 if rank == 0 else 0.5, op) == (n - 1) / 2 or op == "max"
            # an int here, a float there
            assert type(all_reduce(0 if rank == 0 else 0.5, op)) is (int if n == 1 else float)
        nan = float("nan")
        for guilty in range(n):
            mine = nan if rank == guilty else 1.0
            for op in OPS:
                assert math.isnan(all_reduce(mine, op)), (op, guilty)
                for width in (2, 40000):  # together with the exchange, and after it
                    result = all_reduce(torch.tensor([mine, 1.0]).repeat(width // 2), op)
                    assert result[::2].isnan().all() and not result[1::2].isnan().any(), op

        half = torch.full((2,), 40000.0, dtype=torch.float16)
        assert torch.equal(all_reduce(half, "mean"), half), "the sum would overflow"
        for dtype in DTYPES:
            for width in (2, 30000):
                result = all_reduce(torch.ones(width, dtype=dtype))
                assert result.dtype == dtype and result.tolist() == [n] * width
        assert all_reduce(torch.tensor(-1, dtype=torch.int8), "product").item() == (-1) ** n
        assert all_reduce(torch.tensor(127, dtype=torch.int8)).item() == (127 * n + 128) % 256 - 128
        for dtype in (torch.float32, torch.float64):  # each number, a subnormal too, meets others
            tiny = torch.finfo(dtype).smallest_normal / 4
            signed = [-math.inf, -1.5, -tiny, 0.0, tiny, 1.5, math.inf]
            for width in (1, 9000):  # together with the exchange, and after it
                rows = [torch.tensor(signed, dtype=dtype).roll(r).repeat(width) for r in range(n)]
                assert torch.equal(all_reduce(rows[rank], "min"), torch.stack(rows).amin(0))
                assert torch.equal(all_reduce(rows[rank], "max"), torch.stack(rows).amax(0))
                zeros = torch.full((width,), -0.0, dtype=dtype)
                assert all_reduce(zeros, "min").signbit().all()
        assert torch.equal(all_reduce(torch.tensor([1 + 2j]).conj()), n * torch.tensor([1 - 2j]))

        mine = torch.arange(6, dtype=torch.float32).view(2, 3).t() + rank
        kept = mine.clone()
        result = all_reduce(mine)
        assert torch.equal(mine, kept) and result.dtype == torch.float32
        assert torch.equal(result, n * torch.arange(6.0).view(2, 3).t() + n * (n - 1) / 2)
        assert result.is_contiguous()
        assert torch.equal(all_reduce(torch.ones(2).expand(3, 2)), torch.full((3, 2), float(n)))
        import logging, unittest
        case, leaf = unittest.TestCase(), torch.ones(2, requires_grad=True)
        with case.assertNoLogs("ezpz_dist"), torch.no_grad():
            assert not all_reduce(leaf, "mean").requires_grad
        with case.assertLogs("ezpz_dist", "WARNING") as logs:
            assert not all_reduce(2 * leaf).requires_grad and not broadcast(2 * leaf).requires_grad
        (said,) = logs.output  # once
        assert "all_reduce() of a tensor with requires_grad returns one without" in said
        assert all_reduce(torch.empty(0, 3)).shape == (0, 3)

        # dicts: the order of insertion does not matter; each rank keeps its own
        for width in (3, 50000):
            parts = {
                "loss": float(rank), 7: rank, "empty": {}, "none": torch.empty(0),
                "deep": {"w": torch.full((width,), 2.0), "b": torch.ones((), dtype=torch.bfloat16)},
                "count": torch.full((2,), rank, dtype=torch.int64),
            }
            if rank % 2:
                parts = dict(reversed(parts.items()))
            got = all_reduce(parts)
            assert list(got) == list(parts)
            assert got["loss"] == got[7] == n * (n - 1) / 2 and type(got[7]) is int
            assert got["empty"] == {} and got["none"].shape == (0,)
            assert got["deep"]["w"].tolist() == [2.0 * n] * width
            assert got["deep"]["b"].dtype == torch.bfloat16 and got["deep"]["b"] == n
            assert got["count"].tolist() == [n * (n - 1) // 2] * 2
            small = got["deep"]["b"], got["count"]
            assert all(t.untyped_storage().nbytes() == t.nbytes for t in small)
        odd = all_reduce({"a": torch.ones(3), "b": torch.ones(3) * 1j, "c": torch.ones(3) * 1j})
        assert odd["c"].tolist() == [n * 1j] * 3
        many = {f"{i}": i * 1.0 for i in range(300)}
        assert all_reduce(many, "max") == many and all_reduce({}) == {}
        assert all_reduce(collections.OrderedDict(a=1)) == {"a": n}
        cleanup()
        """
    ranks(n, script)


@pytest_n
def test_numpy(ranks, n):
    pytest.importorskip("numpy")
    script = """
        import numpy as np
        rank, n = setup_torch(timeout=60), dist.get_world_size()
        fixed = np.arange(4, dtype=np.float32).reshape(2, 2)
        fixed.flags.writeable = False
        for width in (1, 9000):
            mine = {"a": np.repeat(fixed, width, 1)[::-1], "b": np.ones((), dtype=np.int16)}
            got = all_reduce(mine)
            assert type(got["a"]) is np.ndarray and got["a"].dtype == np.float32
            assert (got["a"] == n * mine["a"]).all() and got["a"].shape == (2, 2 * width)
            assert got["b"].dtype == np.int16 and got["b"].shape == () and got["b"] == n
        # an array on one rank and a tensor on another: each gets its own kind
        mixed = all_reduce(np.ones(3) if rank else torch.ones(3, dtype=torch.float64))
        assert type(mixed) is (np.ndarray if rank else torch.Tensor) and mixed.tolist() == [n] * 3

        scalar = all_reduce(np.float32(rank))
        assert type(scalar) is np.float32 and scalar == n * (n - 1) / 2
        assert type(all_reduce(np.float64(1))) is np.float64
        assert type(all_reduce(np.int32(rank), "mean")) is np.float64
        assert type(all_reduce(np.int8(100))) is (np.int8 if n == 1 else int)
        assert all_reduce(np.int8(100)) == 100 * n
        mixed = all_reduce(1 if rank else np.float16(1), "max")
        assert type(mixed) is (float if rank else np.float16)
        cleanup()
        """
    ranks(n, script)


@pytest_n
def test_objects(ranks, n):
    script = """
        rank, n = setup_torch(timeout=60), dist.get_world_size()
        root = n - 1

        assert broadcast({"rank": rank}, root=root) == {"rank": root}
        assert broadcast(None if rank else [1, "a"]) == [1, "a"]
        large = broadcast(bytes(range(256)) * 32768 if rank == 0 else None)
        assert large == bytes(range(256)) * 32768, "8 MB"
        # root is a rank, of whichever type
        odd = sys.modules["numpy"].int64(root) if rank and "numpy" in sys.modules else root
        assert broadcast(rank, odd) == root
        mine = [rank]
        assert (broadcast(mine, root) is mine) == (rank == root)

        dtypes = [getattr(torch, name) for name in (
            "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
            "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "uint16",
            "uint64", "complex32") if hasattr(torch, name)]
        for dtype in dtypes:
            for shape in ((), (0, 3), (2, 3), (40, 50)):
                bits = torch.arange(2).repeat(3000)[: torch.Size(shape).numel()].reshape(shape)
                sent = bits.to(dtype) if rank == root else None
                got = broadcast(sent, root)
                assert got.dtype == dtype and got.shape == shape and got.device.type == "cpu"
                assert torch.equal(got.to(torch.complex64), bits.to(torch.complex64)), dtype
        turned = torch.arange(600.0, requires_grad=True).view(20, 30)
        got = broadcast(turned.t() if rank == root else "not looked at", root)
        assert torch.equal(got, turned.detach().t()) and not got.requires_grad
        for size in (3, 90):
            got = broadcast(torch.nn.Parameter(torch.ones(size)), root)
            assert type(got) is torch.Tensor and not got.requires_grad
        axes = torch.ones([1] * 40 + [300])
        assert broadcast(axes if rank == root else None, root).shape == axes.shape
        weird = torch.tensor([1 + 2j]).repeat(99).conj()
        assert torch.equal(broadcast(weird if rank == root else None, root), weird.resolve_conj())
        sparse = broadcast(torch.eye(3).to_sparse() if rank == root else None, root)
        assert torch.equal(sparse.to_dense(), torch.eye(3))
        model = broadcast(torch.nn.Linear(9, 9) if rank == root else None, root)
        assert model.weight.requires_grad and isinstance(model.weight, torch.nn.Parameter)
        same = [torch.ones(2)] * 2 if rank == root else None
        first, second = broadcast({"a": same}, root)["a"]
        assert first is second

        assert all_gather_object(("from", rank)) == [("from", r) for r in range(n)]
        for sizes in ([10_000] * 3, [10, 600_000, 10], [1, 10_000, 10_000]):
            got = all_gather_object("x" * sizes[rank])
            assert [len(one) for one in got] == sizes[:n]
        got = all_gather_object(torch.full((2,), rank, requires_grad=False))
        assert [one.tolist() for one in got] == [[r, r] for r in range(n)]
        barrier(), barrier(timeout=30)
        synchronize(), synchronize("cpu")
        assert "mpi4py.MPI" not in sys.modules
        cleanup()
        """
    ranks(n, script)


def test_before_set_up_no_local_answer_in_a_world_of_several(ranks):
    script = """
        calls = (barrier, lambda: all_reduce(1), lambda: broadcast(1), lambda: all_gather_object(1),
                 lambda: all_reduce(1, implementation="mpi"),
                 lambda: wrap_model(torch.nn.Linear(1, 1)))
        for call in (*calls, data_share, lambda: share_of([1, 2]), lambda: DataParallelSampler(3),
                     lambda: DataLoader([1, 2]), node_group,
                     lambda: scatter_from_one_reader(list),
                     lambda: read_share("x", torch.int8, [1]), lambda: SnapshotOnSignal(print)):
            raises(NotSetUpError, "before setup_torch()", call)
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo")
        dist.barrier()  # rank 0 has the store: were it to end now, others could still wait
        # nor where nothing but the group itself says that there are several
        for name in [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK",
                     "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]:
            del os.environ[name]
        said = f"on rank {rank} of 3, in a process group that setup_torch() did not make"
        for call in calls[:-1]:
            raises(NotSetUpError, said, call)
        dist.destroy_process_group()
        """
    ranks(3, script)


@pytest.mark.parametrize("bad", ["1", None, True, [1], 1j, {"a": {"b": "x"}}])
def test_what_cannot_be_reduced(bad):
    with pytest.raises(TypeError, match="expected an int, a float or a tensor") as caught:
        all_reduce(bad)
    assert ("at key 'a' > 'b'" in str(caught.value)) == isinstance(bad, dict)


def test_what_numpy_has_and_cannot_be_reduced():
    numpy = pytest.importorskip("numpy")
    for bad in (numpy.bool_(True), numpy.complex64(1), numpy.longdouble(1)):
        with pytest.raises(TypeError, match="expected an int, a float or a tensor"):
            all_reduce(bad)
    with pytest.raises(TypeError, match="MaskedArray; expected"):
        all_reduce(numpy.ma.masked_array([1.0], mask=[True]))
    with pytest.raises(TypeError, match="all_reduce of a <U1 array"):
        all_reduce(numpy.array(["a"]))
    with pytest.raises(TypeError, match=r"all_reduce of a torch\.strided torch\.bool"):
        all_reduce(numpy.array([True]))


def test_unknown_operations_roots_and_implementations():
    with pytest.raises(ValueError, match="op 'median'; expected one of sum, mean"):
        all_reduce(1, "median")
    with pytest.raises(ValueError, match=r"mean of a torch\.int64 tensor.*; it is at key 'n'"):
        all_reduce({"n": torch.ones(1, dtype=torch.int64)}, "mean")
    meta = torch.ones(1, device="meta")
    for refused in (torch.ones(1, dtype=torch.bool), torch.ones(1).to_sparse(), meta):
        with pytest.raises(TypeError, match=r"expected a dense one of torch\.float16"):
            all_reduce(refused)
    for op in ("max", "product"):
        with pytest.raises(ValueError, match=rf"the {op} of a torch\.complex64"):
            all_reduce(torch.ones(1, dtype=torch.complex64), op)
    with pytest.raises(OverflowError, match="expected an int of at most 64 bits"):
        all_reduce(1 << 63)
    with pytest.raises(TypeError, match=r"the key \(1, 2\); expected strings or ints"):
        all_reduce({(1, 2): 1})
    with pytest.raises(ValueError, match="root 1; expected a rank from 0 to 0"):
        broadcast(1, root=1)
    with pytest.raises(TypeError, match="root '0'; expected a rank, an int"):
        broadcast(1, root="0")
    for call in (barrier, lambda **options: all_reduce(1, **options)):
        with pytest.raises(ValueError, match="implementation 'MPI'; expected 'torch' or 'mpi'"):
            call(implementation="MPI")
    with pytest.raises(ValueError, match="timeout 0; expected seconds, more than 0"):
        barrier(timeout=0)


def test_in_one_process_without_set_up(clean_env, monkeypatch):
    monkeypatch.setattr("os.environ", clean_env)
    barrier(implementation="mpi", timeout=1)
    assert (all_reduce(2), all_reduce(2, implementation="mpi"), broadcast("x")) == (2, 2, "x")
    anything = torch.nn.Linear(1, 1)
    assert all_gather_object(anything) == [anything]
    assert wrap_model(anything) is anything


# The arithmetic that every rank does alike, without ranks.


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
