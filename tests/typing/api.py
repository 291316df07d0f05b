"""Documented usage, checked and never run: `assert_type` fails where a name's type changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import structlog
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

import ezpz
import ezpz.tp
import ezpz_device
import ezpz_dist
import ezpz_launch
import ezpz_obs
import ezpz_topo
import ezpz_tp


def who_am_i() -> None:
    """Ranks, hosts, machine and devices."""
    for number in (
        ezpz.get_rank(), ezpz.get_local_rank(), ezpz.get_world_size(),
        ezpz.get_world_size(total=True), ezpz.get_world_size_total(), ezpz.get_world_size_in_use(),
        ezpz.get_num_nodes(), ezpz.get_node_index(), ezpz.get_gpus_per_node(),
        ezpz.get_cpus_per_node(), ezpz.get_rank({"RANK": "0"}),
    ):  # fmt: skip
        assert_type(number, int)
    for text in (
        ezpz.get_hostname(), ezpz.get_machine(), ezpz.get_torch_device(),
        ezpz.get_torch_device_type(), ezpz.get_torch_backend(), ezpz.print_dist_setup(),
    ):  # fmt: skip
        assert_type(text, str)
    assert_type(ezpz.get_nodes_from_hostfile("nodes"), list[str])
    assert_type(ezpz.get_nodes_from_hostfile(hostfile="nodes"), list[str])
    assert_type(ezpz.get_hostfile_with_fallback(), Path)
    assert_type(ezpz.get_hostfile_with_fallback(hostfile="nodes"), Path)
    assert_type(ezpz.write_localhost_to_hostfile(hostfile="nodes"), Path)
    assert_type(ezpz.write_hostfile_from_list_of_hosts(["a", "b"], "nodes"), Path)
    assert_type(ezpz.write_hostfile_from_list_of_hosts(hosts=["a"], hostfile="nodes"), Path)
    assert_type(ezpz.get_world_size(total=True, in_use=False), int)
    assert_type(ezpz.get_device_properties(), dict[str, Any])
    assert_type(ezpz.get_device_properties(device="cpu"), dict[str, Any])
    assert_type(ezpz.get_peak_flops("bf16"), float | None)
    assert_type(ezpz.TORCH_DTYPES_MAP["bf16"], torch.dtype)
    assert_type(ezpz.get_dist_info(), dict[str, Any])
    assert_type(ezpz.query_environment(), dict[str, Any])


def collectives(loss: Tensor) -> None:
    """What all ranks call; a broadcast keeps its argument's type."""
    assert_type(ezpz.broadcast({"lr": 0.1}), dict[str, float])
    assert_type(ezpz.broadcast(obj=loss, root=1), Tensor)
    assert_type(ezpz.broadcast(loss, 1), Tensor)
    assert_type(ezpz.all_gather_object(3), list[Any])
    ezpz.all_reduce(loss, op="mean")
    ezpz.all_reduce(loss, "mean", "torch")
    ezpz.all_reduce(obj=loss, op="mean", implementation="torch")
    ezpz.barrier(timeout=60)
    ezpz.barrier(None, "mpi")
    ezpz.barrier(group=None, implementation="mpi")
    ezpz.synchronize()


@ezpz.timeitlogit(rank=0)
def scaled(values: list[float], factor: float = 2.0) -> list[float]:
    """A decorated function keeps its signature."""
    return [value * factor for value in values]


def training(build: type[nn.Module], outdir: Path) -> None:
    """The script of the README, with what may be added to it."""
    rank = ezpz.setup_torch(
        seed=42, tensor_parallel_size=2, pipeline_parallel_size=1, context_parallel_size=1
    )
    assert_type(rank, int)
    assert_type(ezpz.setup_torch("pytorch", "gloo", 42), int)
    assert_type(ezpz.setup_torch(framework="pytorch", backend="gloo"), int)
    ezpz.setup_wandb(project_name="talk")
    assert_type(ezpz.seed_everything(seed=1), int)
    model = ezpz.wrap_model(build(), use_fsdp=True, dtype="bf16")
    model = ezpz.wrap_model(build(), True, "bf16")
    assert_type(model, nn.Module)
    assert_type(ezpz.wrap_model_for_ddp(model=build()), DistributedDataParallel)
    ezpz.wrap_model_for_fsdp(model=build())
    assert_type(ezpz.wrap_model_for_fsdp2(model=build(), shard_size=4), nn.Module)
    optimizer = ezpz.wrap_optimizer_for_zero1(torch.optim.AdamW, model.parameters(), lr=1e-3)
    optimizer.step()
    logger = ezpz.get_logger(name=__name__)
    assert_type(logger, structlog.typing.FilteringBoundLogger)
    history = ezpz.History(outdir, sinks=["tensorboard"], cross_rank=True)
    assert_type(history, ezpz_obs.History)
    loaded = ezpz.load_checkpoint(outdir, model=model, optimizer=optimizer)
    first = 0 if loaded is None else loaded.step + 1
    assert_type(first, int)
    for step in ezpz.progress(range(first, 10)):
        assert_type(step, int)
        logger.info(history.update({"loss": 1.0}))
        saving = ezpz.save_checkpoint(
            outdir, model=model, optimizer=optimizer, step=step, asynchronous=True
        )
        assert_type(saving, ezpz_dist.Saving)
    assert_type(ezpz.latest_checkpoint(outdir), ezpz_dist.Checkpoint | None)
    assert_type(ezpz.verify_wandb(), bool)
    assert_type(ezpz.write_report(outdir), tuple[Path, ...])
    ezpz.log_dict_as_bulleted_list(d={"lr": 1e-3}, name="settings")
    assert_type(scaled([1.0], factor=3.0), list[float])
    ezpz.breakpoint(rank=0)
    ezpz.cleanup()


def tensor_parallel(tokens: Tensor) -> None:
    """Groups and layers, by ezpz.tp and by ezpz_tp: the same."""
    ezpz.tp.initialize_tensor_parallel(2, 1, 1)
    ezpz.tp.initialize_tensor_parallel(
        tensor_parallel_size=2, pipeline_parallel_size=2, context_parallel_size=1
    )
    for group in (
        ezpz.tp.get_tensor_parallel_group(), ezpz.tp.get_data_parallel_group(),
        ezpz.tp.get_pipeline_parallel_group(), ezpz.tp.get_context_parallel_group(),
    ):  # fmt: skip
        assert_type(group, ProcessGroup)
    for number in (
        ezpz.tp.get_tensor_parallel_rank(), ezpz.tp.get_tensor_parallel_world_size(),
        ezpz.tp.get_data_parallel_rank(), ezpz.tp.get_data_parallel_world_size(),
        ezpz.tp.get_pipeline_parallel_rank(), ezpz.tp.get_pipeline_parallel_world_size(),
        ezpz.tp.get_context_parallel_rank(), ezpz.tp.get_context_parallel_world_size(),
    ):  # fmt: skip
        assert_type(number, int)
    up = ezpz.tp.ColumnParallelLinear(64, 256, gather_output=False)
    assert_type(up, ezpz_tp.ColumnParallelLinear)
    assert_type(up.weight, nn.Parameter)
    assert_type(up.bias, nn.Parameter | None)
    assert_type(up.tp_size, int)
    table = ezpz_tp.VocabParallelEmbedding(1000, 64)
    assert_type(table.vocab_start_index, int)
    assert_type(table(tokens), Any)  # as nn.Module declares every call
    ezpz_tp.finalize_grads(up)
    ezpz.tp.destroy_tensor_parallel()


def alone(env: Mapping[str, str]) -> None:
    """Each package by itself."""
    topology = ezpz_topo.detect(env)
    assert_type(topology, ezpz_topo.Topology)
    assert_type(topology.rank.rank, int)
    assert_type(topology.rank.sources["rank"], str)
    assert_type(ezpz_topo.expand_nodelist("nid[1-3]"), list[str])
    assert_type(ezpz_topo.fold_nodelist(["nid1", "nid2"]), str)
    assert_type(ezpz_device.get_memory(), ezpz_device.Memory)
    assert_type(ezpz_launch.main(["--dry-run", "true"]), int)
    assert_type(ezpz_tp.RankLayout(8, tensor=2), ezpz_tp.RankLayout)
