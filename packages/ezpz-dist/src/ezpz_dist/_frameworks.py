"""DeepSpeed: imported only when requested, and made to see our ranks."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from ezpz_topo import RankInfo

from . import _replicas
from ._errors import SetupError, WrapError
from ._members import Members
from ._replicas import has_meta
from ._watch import waiting
from ._world import find_world, finish_before_leaving, parallel_state, variables

logger = logging.getLogger(__name__)

FRAMEWORKS = ("DDP", "deepspeed")  # the first is torch itself


def check_framework(name: str, device: torch.device) -> None:
    """Import a framework and see that it can be used here, before any rank waits for another."""
    if name == "horovod":
        raise SetupError(
            "framework='horovod'; expected 'DDP', which averages gradients over the same ranks: "
            "Horovod's last release, 0.28.1, does not build against torch 2.1 or later"
        )
    if name not in FRAMEWORKS:
        raise SetupError(f"framework {name!r}; expected one of {', '.join(FRAMEWORKS)}")
    if name == "deepspeed":
        _check_deepspeed(device)


def prepare_framework(name: str, info: RankInfo, device: torch.device, backend: str) -> None:
    if name == "deepspeed":
        _prepare_deepspeed(info, device, backend)


# DeepSpeed on the process group that there is.


def _check_deepspeed(device: torch.device) -> None:
    wanted = os.environ.get("DS_ACCELERATOR", device.type)
    if wanted != device.type:
        raise SetupError(
            f"DS_ACCELERATOR={wanted!r} while this rank computes on {device.type}; expected the "
            f"same; unset DS_ACCELERATOR, or export TORCH_DEVICE={wanted}"
        )
    # It looks for devices while it is imported, and keeps to what it found.
    with variables({"DS_ACCELERATOR": device.type}):
        deepspeed = _import_deepspeed()
        found = deepspeed.accelerator.get_accelerator().device_name()
    if found != device.type:
        raise SetupError(
            f"DeepSpeed chose {found} when it was imported, and this rank computes on "
            f"{device.type}; expected the same; import deepspeed after setup_torch, or export "
            f"DS_ACCELERATOR={device.type} before"
        )


def _import_deepspeed() -> Any:
    try:
        return importlib.import_module("deepspeed")
    except Exception as error:  # an old DeepSpeed fails on a new torch in many ways, all at import
        if isinstance(error, ModuleNotFoundError) and error.name == "deepspeed":
            raise SetupError(
                "DeepSpeed is not installed (no module named 'deepspeed'); expected it with "
                'framework="deepspeed"; pip install deepspeed'
            ) from error
        reason = " ".join(str(error).split())
        raise SetupError(
            f"DeepSpeed is installed and cannot be imported with torch {torch.__version__} "
            f"({type(error).__name__}: {reason}); expected a release that fits this torch; "
            "pip install --upgrade deepspeed"
        ) from error


def _prepare_deepspeed(info: RankInfo, device: torch.device, backend: str) -> None:
    world = find_world()
    assert world is not None  # set-up has entered it
    if "deepspeed" in world.kept:
        return
    deepspeed = _import_deepspeed()
    with ExitStack() as stack:
        # Its processes (data loaders that are spawned) are to choose the same device.
        stack.enter_context(variables({"DS_ACCELERATOR": device.type}))
        if "LOCAL_RANK" not in os.environ:
            # A world of one exports nothing, and DeepSpeed reads this one. Without the other
            # two it would be half of a launcher's set.
            place = {"RANK": info.rank, "WORLD_SIZE": info.world_size, "LOCAL_RANK": 0}
            stack.enter_context(variables({name: str(each) for name, each in place.items()}))
        installed = importlib.import_module("deepspeed.git_version_info").installed_ops
        if device.type == "cpu" and not installed.get("deepspeed_shm_comm"):
            # DeepSpeed's own all-reduce among a node's CPUs, which only its inference engine calls.
            # Its build takes minutes, and waits for ever if an earlier one was killed. One that was
            # built with DeepSpeed (DS_BUILD_SHM_COMM=1) stays.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # Without the discovery switched off, it would start MPI and overwrite MASTER_ADDR and
        # MASTER_PORT wherever one of torchrun's variables is missing (deepspeed/comm/comm.py).
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
        # It would use these groups after another set-up (0.19.8).
        groups = deepspeed.utils.groups
        stack.callback(getattr(groups, "_release_process_group_references", lambda: None))
        finish_before_leaving(stack.pop_all().close)
    world.kept["deepspeed"] = deepspeed
    logger.debug("DeepSpeed %s on %s takes the process group", deepspeed.__version__, device.type)


# DeepSpeed's configuration: the user's own, and what it lacks.

Config = dict[str, Any]
_DTYPES = {torch.float32: None, torch.bfloat16: "bf16", torch.float16: "fp16"}  # DeepSpeed's keys


def deepspeed_config(
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    zero_stage: int | None = None,
    dtype: str | torch.dtype | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    gradient_clipping: float | None = None,
    device_type: str = "cpu",
) -> Config:
    """Return ``config`` with what it lacks, as `wrap_model_for_deepspeed` gives it to DeepSpeed.

    Nothing is sent, and DeepSpeed is not needed: it checks the values itself, when it makes the
    engine. An ``"auto"`` of Hugging Face's counts as missing where an argument stands for it.

    Args:
        config: DeepSpeed's options, or the path of a JSON file with them
            (https://www.deepspeed.ai/docs/config-json/).
        zero_stage: 0 (DDP), 1 (optimizer state sharded), 2 (gradients too) or 3 (parameters
            too); 1 if ``config`` names none either.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        micro_batch_size: Samples in one forward pass of one rank; DeepSpeed uses it for its own
            data loader and its throughput; 1 if ``config`` has no batch size either.
        gradient_accumulation_steps: Backward passes for one step.
        gradient_clipping: The largest norm of all gradients.
        device_type: ``"cpu"``, ``"cuda"``, ...: without an accelerator DeepSpeed's Adam is
            torch's, which needs no compiler.

    Raises:
        WrapError: ``config`` has another value than an argument, or cannot be read.
        ValueError: ``dtype`` is none of the three.
    """
    settings = _read_config(config)
    _complete(settings, "zero_optimization.stage", zero_stage)
    settings["zero_optimization"].setdefault("stage", 1)
    _complete(settings, "gradient_clipping", gradient_clipping)
    _complete(settings, "gradient_accumulation_steps", gradient_accumulation_steps)
    _complete(settings, "train_micro_batch_size_per_gpu", micro_batch_size)
    _complete(settings, "train_batch_size", None)
    if "train_batch_size" not in settings:
        settings.setdefault("train_micro_batch_size_per_gpu", 1)
    if "bfloat16" in settings:  # DeepSpeed's older name
        settings.setdefault("bf16", settings.pop("bfloat16"))
    if dtype is not None:
        wanted = _replicas.as_floating(dtype)
        if wanted not in _DTYPES:
            raise ValueError(f"dtype {wanted}; expected float32, bfloat16 or float16")
        for name in ("bf16", "fp16"):
            _complete(settings, f"{name}.enabled", name == _DTYPES[wanted])
    optimizer = settings.get("optimizer", {})
    is_adam = str(optimizer.get("type")).lower() in ("adam", "adamw")
    if is_adam and device_type not in ("cuda", "xpu"):
        # DeepSpeed's own would be compiled for the CPU first, for two minutes.
        optimizer.setdefault("params", {}).setdefault("torch_adam", True)
    return settings


def _read_config(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    try:
        read = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WrapError(f"config {str(config)!r}: {error}; expected a JSON file") from error
    if not isinstance(read, dict):
        raise WrapError(f"config {str(config)!r}: {type(read).__name__}; expected a JSON object")
    return read


def _complete(settings: Config, path: str, value: object) -> None:
    """Set a key that a configuration lacks; raise if it has another value."""
    key, _, name = path.rpartition(".")
    section = settings
    if key:
        section = settings.setdefault(key, {})
        if not isinstance(section, dict):
            raise WrapError(f"config: {key} is {section!r}; expected a dict")
    if section.get(name) == "auto":
        del section[name]
    if value is not None and section.setdefault(name, value) != value:
        raise WrapError(
            f"config: {path} is {section[name]!r}, the argument says {value!r}; expected one of "
            'them, or "auto" in config'
        )


# DeepSpeed's engine around a model, on the ranks that are there.

_CALL = "wrap_model_for_deepspeed()"

# Optimizers that ZeRO may give any part of a parameter, beside those that DeepSpeed lists. Others
# (LBFGS, Adafactor, Muon) would be wrong without a sign.
_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ("SGD", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop")
)


def wrap_model_for_deepspeed(
    model: nn.Module,
    optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None,
    *,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    zero_stage: int | None = None,
    dtype: str | torch.dtype | None = None,
    micro_batch_size: int | None = None,
    gradient_accumulation_steps: int | None = None,
    gradient_clipping: float | None = None,
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    training_data: Dataset[Any] | None = None,
    collate_fn: Callable[..., Any] | None = None,
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
        config, zero_stage, micro_batch_size: See `deepspeed_config`.
        gradient_accumulation_steps, gradient_clipping: As well.
        dtype: As well; the model is cast to it.
        scheduler: A scheduler of ``optimizer``, or a function that makes one from it.
        training_data: A dataset that DeepSpeed makes the loader of, sharded over the ranks.
        collate_fn: Makes a batch of samples, for that loader.

    Returns:
        What ``deepspeed.initialize`` returns; what there is none of is None.

    Raises:
        MismatchError, NotSetUpError: As of `wrap_model_for_ddp`.
        SetupError: DeepSpeed is not installed, or does not fit.
        WrapError: The model is wrapped already, an argument contradicts ``config``, or the
            ranks do not agree.
        ValueError: ``dtype`` is none of the three. DeepSpeed raises errors of its own where it
            cannot use the configuration.
    """
    replicas = _replicas.find_replicas(_CALL)
    world = replicas.world
    options: dict[str, Any] = {
        "zero_stage": zero_stage,
        "dtype": dtype,
        "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "gradient_clipping": gradient_clipping,
    }
    arguments = {**options, "optimizer": optimizer, "scheduler": scheduler}
    with _replicas.require_agreement(_CALL, model, arguments, replicas) as lines:
        _check_deepspeed(world.device)
        _refuse(model, optimizer, replicas)
        settings = deepspeed_config(config, **options, device_type=world.device.type)
        if type(optimizer) in _ELEMENTWISE:
            settings.setdefault("zero_allow_untested_optimizer", True)
        # A file can differ between hosts.
        for name, value in sorted(settings.items()):
            lines[f"config {name}"] = repr(value)
    _prepare_deepspeed(world.info, world.device, world.backend)
    trained = None
    if settings.get("optimizer") or (optimizer and not isinstance(optimizer, Optimizer)):
        # For an optimizer that DeepSpeed makes; by default it takes frozen parameters too.
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # DeepSpeed insists that it be LOCAL_RANK, which is the device's number: 0 on every rank where
    # each sees one device only.
    hidden = variables({"OMPI_COMM_WORLD_LOCAL_RANK": None})
    with waiting(f"deepspeed.initialize for {_CALL}", world, replicas.ranks), hidden:
        engine, wrapped, loader, made_scheduler = _import_deepspeed().initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=trained,
            lr_scheduler=scheduler,
            training_data=training_data,
            collate_fn=collate_fn,
            mpu=_model_parallel_unit(),
            dist_init_required=False,
            config=settings,
        )
    # DeepSpeed gives all ranks the same parameters, and leaves buffers as each rank has them.
    _replicas.broadcast_start_values(list(model.buffers()), replicas)
    # For good: the engine's hooks stay on its parameters.
    _replicas.register_wrapped(model, "DeepSpeed")
    return engine, wrapped, loader, made_scheduler


def _model_parallel_unit() -> Any:
    """Return ezpz_tp's groups in the form that DeepSpeed reads; None if only data is split."""
    state = parallel_state()
    if state is None:
        return None
    if state.size("tensor") * state.size("pipeline") * state.size("context") == 1:
        return None
    import ezpz_tp.mpu  # noqa: PLC0415  # only where its groups are used

    return ezpz_tp.mpu


def _refuse(model: nn.Module, optimizer: object, replicas: Members) -> None:
    _replicas.check_model(_CALL, model, replicas)
    if has_meta(model):
        raise WrapError(
            f"{type(model).__name__} has parameters on the meta device; expected real ones; for a "
            "model that is too large for one rank build it under deepspeed.zero.Init()"
        )
    if isinstance(optimizer, Optimizer):
        own = set(model.parameters())
        optimized = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        foreign = [parameter for parameter in optimized if parameter not in own]
        if foreign:
            raise WrapError(
                f"{len(foreign)} of the optimizer's {len(optimized)} parameters are not the "
                "model's; expected an optimizer over model.parameters(), made after the model was "
                "built"
            )
