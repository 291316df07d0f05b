import inspect
import math
import sys
import textwrap

import pytest

torch = pytest.importorskip("torch")

from ezpz_obs import ObsError, gradient_norm  # noqa: E402


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))


def with_gradients(module, x=None):
    x = torch.arange(14.0).reshape(2, 7) if x is None else x
    module(x).square().sum().backward()
    return module


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])
def test_it_is_torchs_own(order):
    module = with_gradients(model())
    expected = torch.nn.utils.get_total_norm([one.grad for one in module.parameters()], order)
    for given in (module, module.parameters(), list(module.parameters())):
        found = gradient_norm(given, order)
        assert found.shape == ()
        torch.testing.assert_close(found, expected)
    assert not found.requires_grad
    bias = module[2].bias
    torch.testing.assert_close(gradient_norm(bias, order), bias.grad.norm(order))
    module[0].weight.grad = None
    grads = [one.grad for one in module.parameters() if one.grad is not None]
    expected = torch.nn.utils.get_total_norm(grads, order)
    torch.testing.assert_close(gradient_norm(module, order), expected)


def test_dtypes_an_empty_one_and_sparse_gradients():
    half = torch.nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    found = gradient_norm([half])
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(100_000**0.5, rel=1e-5), "summed in single precision"
    dtypes = (torch.float16, torch.float32, torch.float64, torch.complex64)
    parameters = [torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in dtypes]
    parameters.append(torch.nn.Parameter(torch.zeros(0)))
    for one in parameters:
        one.grad = torch.full_like(one, 3)
    found = gradient_norm(parameters)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx((4 * 4 * 9) ** 0.5)
    assert gradient_norm(parameters, math.inf).item() == 3
    table = torch.nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert gradient_norm(table).item() == pytest.approx((4 * 2**2 + 4) ** 0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_what_is_not_finite_is_seen(value, order):
    module = with_gradients(model())
    module[0].bias.grad[2] = value
    assert not gradient_norm(module, order).isfinite()


def test_what_is_refused(monkeypatch):
    with pytest.raises(ObsError, match=r"none of 4 parameters has a gradient; .*backward\(\)"):
        gradient_norm(model())
    module = with_gradients(model())
    with pytest.raises(ValueError, match="norm_type 0"):
        gradient_norm(module, 0)
    monkeypatch.delitem(sys.modules, "ezpz_tp", raising=False)
    module[0].weight.tensor_model_parallel = True  # Megatron's parts, without ezpz_tp
    with pytest.raises(ObsError, match=r"ezpz_tp\.get_grad_norm"):
        gradient_norm(module)


MODEL = """
import math
from ezpz_obs import gradient_norm
""" + "\n".join(map(inspect.getsource, (model, with_gradients)))


def test_fsdp_on_two_ranks(ranks):
    code = """
    import warnings
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    warnings.simplefilter("ignore")
    for originals in (False, True):
        cpu = torch.device("cpu")
        module = FullyShardedDataParallel(model(), device_id=cpu, use_orig_params=originals)
        try:
            gradient_norm(with_gradients(module))
        except Exception as error:
            say(f"{type(error).__name__}: {error}")
    module = model()
    plain = with_gradients(model())
    for layer in module:
        fully_shard(layer)
    fully_shard(module)
    with_gradients(module)
    for order in (1.0, 2.0, math.inf):
        say([gradient_norm(module, order).item(), gradient_norm(plain, order).item()])
    # Of DTensors beside plain parameters.
    extra = torch.nn.Parameter(torch.zeros(2)); extra.grad = torch.ones(2)
    say([gradient_norm([*module.parameters(), extra]).item() ** 2,
         gradient_norm(plain).item() ** 2 + 2])
    # NaN on one rank is NaN on both.
    if RANK == 1:
        next(module.parameters()).grad.to_local().fill_(math.nan)
    say([gradient_norm(module, order).isnan().item() for order in (2.0, math.inf)])
    """
    for rank in ranks(MODEL + textwrap.dedent(code), 2):
        assert rank.status == 0, rank.err
        refused, (*pairs, nans) = rank.said[:2], rank.said[2:]
        said = "ObsError: parameters of FullyShardedDataParallel"
        assert all(text.startswith(said) for text in refused), "no silently local norm"
        assert len(pairs) == 4
        for found, expected in pairs:
            assert found == pytest.approx(expected, rel=1e-5)
        assert nans == [True, True]


def test_replicated_and_partial_dtensors(ranks):
    code = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(1.0, 13.0).reshape(4, 3)
    for placements in ([Replicate(), Replicate()], [Shard(0), Replicate()], [Replicate(), Shard(1)],
                       [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
        one = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, placements))
        one.grad = distribute_tensor(whole, mesh, placements)
        say([gradient_norm([one]).item(), gradient_norm([one], math.inf).item()])
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.nn.Parameter(
            distribute_tensor(torch.zeros(4, 3, dtype=dtype), mesh, [Replicate()] * 2)
        )
        part = (whole / 2).to(dtype)
        one.grad = DTensor.from_local(part, mesh, [Partial(), Replicate()])
        say([gradient_norm([one]).item(), gradient_norm([one], math.inf).item()])
    """
    expected = torch.arange(1.0, 13.0).norm().item()
    for rank in ranks(MODEL + textwrap.dedent(code), 4):
        assert rank.status == 0, rank.err
        assert len(rank.said) == 7
        for norm, largest in rank.said:
            assert norm == pytest.approx(expected)
            assert largest == 12


def test_ezpz_tps_shards_are_counted_by_ezpz_tp(ranks):
    pytest.importorskip("ezpz_tp")
    code = """
    import ezpz_tp
    ezpz_tp.initialize_tensor_parallel(2)
    torch.manual_seed(0)
    column = ezpz_tp.ColumnParallelLinear(7, 4, gather_output=True)
    x = torch.arange(14.0).reshape(2, 7)
    column(x).square().sum().backward()
    say([gradient_norm(column).item(), ezpz_tp.get_grad_norm(column).item()])
    local = math.sqrt(sum(one.grad.square().sum().item() for one in column.parameters()))
    say(local)
    """
    found = ranks(MODEL + textwrap.dedent(code), 2)
    for rank in found:
        assert rank.status == 0, rank.err
        ours, theirs = rank.said[0]
        assert ours == theirs
        whole = math.hypot(*[each.said[1] for each in found])
        assert ours == pytest.approx(whole, rel=1e-5)
    assert found[0].said[0] == found[1].said[0]
