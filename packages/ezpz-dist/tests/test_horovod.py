"""What is said without Horovod; and how it is called, with a stand-in for it.

Not run with Horovod itself: its last release, 0.28.1, does not build against torch 2.1 or
later. The stand-in has its names and signatures (horovod/torch/__init__.py, optimizer.py,
functions.py of 0.28.1) and sends over torch's group what Horovod would send itself.
"""

import importlib.util
import sys

import pytest
import torch

from ezpz_dist import SetupError
from ezpz_dist._frameworks import check_framework

STAND_IN = """
import os
import torch
import torch.distributed as dist

calls = []
init = lambda: calls.append("init")
rank = lambda: int(os.environ.get("STAND_IN_RANK", os.environ.get("RANK", 0)))
size = lambda: int(os.environ.get("WORLD_SIZE", 1))

class Compression:
    none, fp16 = "none", "fp16"

def broadcast_parameters(params, root_rank):
    for _, tensor in sorted(params.items()):
        dist.broadcast(tensor, root_rank)

def broadcast_optimizer_state(optimizer, root_rank, model=None):
    calls.append("state")

class _DistributedOptimizer(torch.optim.Optimizer):
    def __init__(self, params, named, compression, passes):
        super(self.__class__, self).__init__(params)
        self.compression, self.passes = compression, passes
        self.names = [name for name, _ in named]

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                dist.all_reduce(parameter.grad)
                parameter.grad /= size()
        return super(self.__class__, self).step(closure)

def DistributedOptimizer(
    optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1
):
    members = dict(_DistributedOptimizer.__dict__, __module__="horovod.torch.optimizer")
    kind = type(optimizer.__class__.__name__, (optimizer.__class__,), members)
    return kind(optimizer.param_groups, named_parameters, compression, backward_passes_per_step)
"""


@pytest.fixture
def stand_in(tmp_path):
    package = tmp_path / "stand_in" / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(STAND_IN)
    return str(package.parents[1])


@pytest.mark.parametrize("n", [1, 2])
def test_it_is_called_and_compared(ranks, stand_in, n):
    ranks(
        n,
        f"""
        sys.path.insert(0, {stand_in!r})
        from ezpz_dist._wrap import wrap_model_for_horovod
        rank = setup_torch(framework="horovod", timeout=60)
        n = dist.get_world_size()

        def build():
            torch.manual_seed(3)
            return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16).eval())

        def steps(model, optimizer, samples):
            for x in data:
                loss = model(x[samples]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield loss.item()

        torch.manual_seed(1)
        data = torch.randn(30, 8, 8)
        model = build()
        alone = list(steps(model, torch.optim.SGD(model.parameters(), 0.1), slice(None)))
        model = build()
        if rank:
            torch.nn.init.zeros_(model[0].weight)  # all start from rank 0's
            model[1].running_mean += 1.0
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        same, wrapped = wrap_model_for_horovod(model, optimizer, compress=True)
        assert same is model and (wrapped.compression, wrapped.passes) == ("fp16", 1)
        assert wrapped.names == [name for name, _ in model.named_parameters()]
        per = 8 // n
        found = steps(model, wrapped, slice(rank * per, rank * per + per))
        for mine, expected in zip(found, alone):
            assert abs(all_reduce(mine, "mean") - expected) <= 1e-5 * expected

        import horovod.torch
        assert horovod.torch.calls == ["init", "state"], "initialized once"
        def refused(text, *args):
            try:
                wrap_model_for_horovod(*args)
            except ezpz_dist.WrapError as error:
                assert text in str(error), error
            else:
                raise AssertionError(f"not refused: {{text}}")

        refused("SGD is Horovod's already; expected torch's own", model, wrapped)
        cleanup()
        if n == 2:
            setup_torch(framework="horovod", tensor_parallel_size=2, timeout=60)
            refused("Horovod averages over all 2 ranks, and 1 hold the same", build(), None)
        cleanup()
        """,
    )


def test_it_sees_another_world(ranks, stand_in):
    done = ranks(
        2,
        f"""
        sys.path.insert(0, {stand_in!r})
        from ezpz_dist._frameworks import prepare_framework
        from ezpz_dist._world import find_world
        setup_torch(timeout=60)
        world = find_world()
        os.environ["STAND_IN_RANK"] = "1"
        try:
            prepare_framework("horovod", world.info, world.device, world.backend)
        except ezpz_dist.SetupError as error:
            print(error)
        cleanup()
        """,
    )
    assert "Horovod sees rank 1 of 2, the launcher (torchrun) says 0 of 2" in done[0]
    assert "start with horovodrun" in done[0]
    assert done[1] == ""


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="Horovod is there")
def test_not_there():
    with pytest.raises(SetupError) as caught:
        check_framework("horovod", torch.device("cpu"))
    message = str(caught.value)
    assert "Horovod cannot be imported (No module named 'horovod')" in message
    assert 'does not build against torch 2.1 or later (C++17): use framework="DDP"' in message
    assert "\n" not in message


def test_there_without_its_library(monkeypatch, tmp_path, capsys):
    # horovod/torch/__init__.py of 0.28.1 prints, and goes on without init()
    package = tmp_path / "horovod" / "torch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("print('Extension horovod.torch has not been built')")
    for name in ("horovod", "horovod.torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SetupError, match=r"\(Extension horovod.torch has not been built\);"):
        check_framework("horovod", torch.device("cpu"))
    assert capsys.readouterr().out == ""
    for name in ("horovod", "horovod.torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
