"""DeepSpeed's engine around a model, on the ranks that are there."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from ezpz_dist._errors import WrapError
from ezpz_dist._hangs.waiting import waiting
from ezpz_dist._meeting.frameworks import check_framework, prepare_framework

from .agreement import agreed, refuse_experts, refuse_unmovable
from .deepspeed_config import Config, deepspeed_config, leaves_of
from .materialize import has_meta
from .replicas import Replicas, find_replicas, parallel_state, start_alike
from .wrapper import refuse_wrapped, remember_inside

_CALL = "wrap_model_for_deepspeed()"

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop")
)
"""Optimizers that treat each number by itself, so that ZeRO may cut a parameter anywhere. Others
(LBFGS, Adafactor, Muon) would be wrong without a sign; those that DeepSpeed lists it takes."""


def wrap_model_for_deepspeed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer
    | Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    | None = None,
    *,
    zero_stage: int | None = None,
    dtype: str | torch.dtype | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    gradient_clipping: float | None = None,
    offload_optimizer: str | None = None,
    offload_parameters: str | None = None,
    nvme_path: str | os.PathLike[str] | None = None,
    scheduler: LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    training_data: Dataset[Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Make a model train by DeepSpeed's ZeRO; return its engine, optimizer, loader and scheduler.

    Train with ``loss = engine(x)...; engine.backward(loss); engine.step()``: the engine
    averages gradients, clips them, and steps optimizer and scheduler once in
    ``gradient_accumulation_steps``. All ranks start from rank 0's values, buffers too. With
    ``ezpz_tp``'s groups, what DeepSpeed shards it shards over the ranks that hold the same
    part of the model. Collective: every rank calls this.

    Args:
        model: The bare model, the same on every rank. It is moved to this rank's device.
        optimizer: One over the model's parameters, or a function that makes one from them;
            None: ``config["optimizer"]``, or none, for evaluation with stage 0 or 3.
        zero_stage: See `deepspeed_config`, as for all that is not explained here.
        dtype: The type that the model is cast to.
        micro_batch_size: Samples in one forward pass of one rank.
        gradient_accumulation_steps: Backward passes for one step.
        gradient_clipping: The largest norm of all gradients.
        offload_optimizer: Where the optimizer's state lies.
        offload_parameters: Where parameters lie that are not in use.
        nvme_path: The folder for ``"nvme"``.
        scheduler: A scheduler of ``optimizer``, or a function that makes one from it.
        training_data: A dataset that DeepSpeed makes the loader of, sharded over the ranks.
        collate_fn: Makes a batch of samples, for that loader.
        config: DeepSpeed's own options, or the path of a JSON file with them.

    Returns:
        What ``deepspeed.initialize`` returns; what there is none of is None.

    Raises:
        MismatchError: The ranks called something else, or with other options.
        NotSetUpError: `setup_torch` was not called.
        SetupError: DeepSpeed is not installed, or does not fit.
        WrapError: The model is wrapped already, an argument contradicts ``config``, or the
            ranks do not agree.
        ValueError: ``dtype`` is none of the three.
    """
    replicas = find_replicas(_CALL)
    world, state = replicas.world, parallel_state()
    options: dict[str, Any] = {
        "zero_stage": zero_stage,
        "dtype": dtype,
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "gradient_clipping": gradient_clipping,
        "offload_optimizer": offload_optimizer,
        "offload_parameters": offload_parameters,
    }
    asked = {**options, "optimizer": optimizer, "scheduler": scheduler}
    with agreed(_CALL, model, asked, replicas) as lines:
        check_framework("deepspeed", world.device)
        _refuse(model, optimizer, replicas)
        settings = deepspeed_config(
            **options,
            nvme_path=nvme_path,
            config=config,
            data_parallel_size=world.info.world_size if state is None else state.size("data"),
            device_type=world.device.type,
        )
        _refuse_two(settings, optimizer, scheduler)
        if type(optimizer) in _ELEMENTWISE:
            settings.setdefault("zero_allow_untested_optimizer", True)
        # A file can differ between hosts.
        lines |= {f"config {name}": repr(value) for name, value in sorted(leaves_of(settings))}
    prepare_framework("deepspeed", world.info, world.device, world.backend)
    deepspeed = importlib.import_module("deepspeed")
    with waiting(f"deepspeed.initialize for {_CALL}", world, replicas.ranks), _one_local_rank():
        made = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=_trainable(model, optimizer, settings),
            training_data=training_data,
            collate_fn=collate_fn,
            lr_scheduler=scheduler,
            mpu=_model_parallel_unit(),
            dist_init_required=False,
            config=settings,
        )
    # DeepSpeed gives all ranks the same parameters, and leaves buffers as each rank has them.
    start_alike(list(model.buffers()), replicas)
    remember_inside(model, "DeepSpeed")  # for good: the engine's hooks stay on its parameters
    return made[0], made[1], made[2], made[3]


def _refuse(model: nn.Module, optimizer: object, replicas: Replicas) -> None:
    refuse_wrapped(model)
    refuse_unmovable(_CALL, replicas)
    refuse_experts(_CALL, model)
    if has_meta(model):
        raise WrapError(
            f"{type(model).__name__} has parameters on the meta device; expected real ones; for a "
            "model that is too large for one rank build it under deepspeed.zero.Init()"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        held = [one for group in optimizer.param_groups for one in group["params"]]
        if foreign := sum(id(one) not in own for one in held):
            raise WrapError(
                f"{foreign} of the optimizer's {len(held)} parameters are not the model's; "
                "expected an optimizer over model.parameters(), made after the model was built"
            )


def _refuse_two(settings: Config, optimizer: object, scheduler: object) -> None:
    for name, given in (("optimizer", optimizer), ("scheduler", scheduler)):
        if given is not None and settings.get(name):
            # DeepSpeed would take the argument and say so in a log line.
            raise WrapError(
                f"config has {name!r} ({settings[name].get('type')}) and {name}= is given "
                f"({type(given).__name__}); expected one of them"
            )
    stage = settings["zero_optimization"]["stage"]
    if optimizer is None and not settings.get("optimizer") and stage in (1, 2):
        raise WrapError(
            f"zero_stage {stage} shards the optimizer's state, and there is no optimizer; expected "
            "one: optimizer=..., or config={'optimizer': {'type': 'AdamW', 'params': {'lr': ...}}}"
        )


def _trainable(model: nn.Module, optimizer: object, settings: Config) -> list[nn.Parameter] | None:
    """Return what an optimizer that DeepSpeed makes is for; by default it takes frozen ones too."""
    if isinstance(optimizer, torch.optim.Optimizer) or not (optimizer or settings.get("optimizer")):
        return None
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _model_parallel_unit() -> Any:
    """Return what tells DeepSpeed of ezpz_tp's groups; None where only data is split."""
    state = parallel_state()
    if state is None or state.size("tensor") * state.size("pipeline") * state.size("context") == 1:
        return None
    import ezpz_tp.mpu  # noqa: PLC0415  # only where its groups are used

    return ezpz_tp.mpu


@contextlib.contextmanager
def _one_local_rank() -> Iterator[None]:
    """Hide Open MPI's local rank from DeepSpeed, which insists that it be LOCAL_RANK.

    LOCAL_RANK is the device's number, and 0 on every rank where each sees one device only.
    """
    name = "OMPI_COMM_WORLD_LOCAL_RANK"
    hidden = os.environ.pop(name, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[name] = hidden
