"""DeepSpeed: imported only when requested, and made to see our ranks."""

from __future__ import annotations

import copy
import difflib
import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
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
    with ExitStack() as made:
        # Its processes (data loaders that are spawned) are to choose the same device.
        made.enter_context(variables({"DS_ACCELERATOR": device.type}))
        if "LOCAL_RANK" not in os.environ:
            # A world of one exports nothing, and DeepSpeed reads this one. Without the other
            # two it would be half of a launcher's set.
            alone = {"RANK": f"{info.rank}", "WORLD_SIZE": f"{info.world_size}", "LOCAL_RANK": "0"}
            made.enter_context(variables(alone))
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
        made.callback(getattr(groups, "_release_process_group_references", lambda: None))
        finish_before_leaving(made.pop_all().close)
    world.kept["deepspeed"] = deepspeed
    logger.debug("DeepSpeed %s on %s takes the process group", deepspeed.__version__, device.type)


# DeepSpeed's configuration, from arguments and a user's own: whole, without contradictions.

Config = dict[str, Any]
AUTO = "auto"  # what Hugging Face's configurations say where the Trainer fills in its own arguments
_DTYPES = {torch.float32: None, torch.bfloat16: "bf16", torch.float16: "fp16"}  # DeepSpeed's keys
_MICRO, _TRAIN = "train_micro_batch_size_per_gpu", "train_batch_size"
_STEPS = "gradient_accumulation_steps"

_KNOWN = (
    _MICRO, _TRAIN, _STEPS, "gradient_clipping", "zero_optimization", "bf16", "fp16",
    "optimizer", "scheduler", "zero_allow_untested_optimizer", "activation_checkpointing",
)  # fmt: skip


def deepspeed_config(
    *, zero_stage: int | None = None, dtype: str | torch.dtype | None = None,
    micro_batch_size: int | None = None, gradient_accumulation_steps: int | None = None,
    gradient_clipping: float | None = None, offload_optimizer: str | None = None,
    offload_parameters: str | None = None, nvme_path: str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    data_parallel_size: int = 1, device_type: str = "cpu",
) -> Config:  # fmt: skip
    """Return the configuration that `wrap_model_for_deepspeed` gives to DeepSpeed.

    Nothing is sent, and DeepSpeed is not needed. What is given in one place only is taken;
    ``"auto"`` in ``config`` is taken from the arguments, or from the defaults named here.

    Args:
        zero_stage: 0 (DDP), 1 (optimizer state sharded), 2 (gradients too) or 3 (parameters
            too); default 1.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``; default ``"fp32"``.
        micro_batch_size: Samples in one forward pass of one rank; DeepSpeed uses it for its own
            data loader and its throughput; default 1, or what ``train_batch_size`` leaves.
        gradient_accumulation_steps: Backward passes for one step; default 1, or what
            ``train_batch_size`` and ``micro_batch_size`` leave.
        gradient_clipping: The largest norm of all gradients; default 0.0: not clipped.
        offload_optimizer: ``"cpu"`` or ``"nvme"``: where the optimizer's state lies, and on
            the CPU where its step is done (stages 1 to 3).
        offload_parameters: ``"cpu"`` or ``"nvme"``: where parameters lie that are not in use
            (stage 3).
        nvme_path: The folder for ``"nvme"``.
        config: DeepSpeed's own options, or the path of a JSON file with them
            (https://www.deepspeed.ai/docs/config-json/).
        data_parallel_size: Ranks that see different samples.
        device_type: ``"cpu"``, ``"cuda"``, ...: without an accelerator DeepSpeed's Adam is
            torch's, which needs no compiler.

    Raises:
        WrapError: An argument and ``config`` say different things, or a value is impossible.
        ValueError: ``dtype`` is none of the three.
    """
    theirs = _read(config)
    _check_names(theirs)
    ours: Config = {
        "zero_optimization": {
            "stage": zero_stage,
            "offload_optimizer": _offload(offload_optimizer, nvme_path),
            "offload_param": _offload(offload_parameters, nvme_path),
        },
        _MICRO: micro_batch_size,
        _STEPS: gradient_accumulation_steps,
        "gradient_clipping": gradient_clipping,
    }
    if dtype is not None:
        wanted = _replicas.as_floating(dtype)
        if wanted not in _DTYPES:
            raise ValueError(f"dtype {wanted}; expected float32, bfloat16 or float16")
        ours |= {name: {"enabled": _DTYPES[wanted] == name} for name in ("bf16", "fp16")}
    defaults: Config = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}
    defaults |= {name: {"enabled": False} for name in ("bf16", "fp16")}
    merged = _merge(_merge(theirs, ours), defaults, default=True)
    _fill_batch_sizes(merged, data_parallel_size)
    if left := [name for name, value in leaves_of(merged) if value == AUTO]:
        raise WrapError(
            f'config: {", ".join(left)} "auto", and no argument says what; expected values; give '
            "them, or leave the keys out for DeepSpeed's own"
        )
    _check(merged)
    used = merged.get("optimizer", {})
    if device_type not in ("cuda", "xpu") and str(used.get("type")).lower() in ("adam", "adamw"):
        # DeepSpeed's own would be compiled for the CPU first, for two minutes.
        used.setdefault("params", {}).setdefault("torch_adam", True)
    return merged


def _read(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    what = f"DeepSpeed's configuration {os.fspath(config)!r}"
    try:
        with open(config, encoding="utf-8") as file:
            read = json.load(file, object_pairs_hook=_without_duplicates)
    except (OSError, ValueError) as error:
        raise WrapError(f"{what} cannot be read ({error}); expected a JSON file") from error
    if not isinstance(read, dict):
        raise WrapError(f"{what} is a {type(read).__name__}; expected a JSON object")
    return read


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Config:
    found: Config = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {name!r} stands in it twice")
        found[name] = value
    return found


def _check_names(theirs: Config) -> None:
    if "bfloat16" in theirs:  # the older name
        if "bf16" in theirs:
            raise WrapError("config has bf16 and bfloat16, which are the same; expected one")
        theirs["bf16"] = theirs.pop("bfloat16")
    for name in theirs:
        # DeepSpeed passes over keys that it does not know: a slip would train something else.
        near = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.9)
        if near and name not in _KNOWN:
            raise WrapError(f"config has {name!r}; expected {near[0]!r}?")
    for name in ("zero_optimization", "bf16", "fp16", "optimizer", "scheduler"):
        if not isinstance(theirs.get(name, {}), dict):
            raise WrapError(f"config: {name} is {theirs[name]!r}; expected a dict")


def _offload(target: str | None, nvme_path: str | os.PathLike[str] | None) -> Config | None:
    if target != "nvme" or nvme_path is None:
        return None if target is None else {"device": target}
    return {"device": target, "nvme_path": os.fspath(nvme_path)}


def _merge(theirs: Config, ours: Config, path: str = "", *, default: bool = False) -> Config:
    """Return both; what both have must be equal, ``"auto"`` in theirs, or None or a default."""
    merged = dict(theirs)
    for name, value in ours.items():
        there = theirs.get(name, AUTO)
        if isinstance(value, dict) and (there == AUTO or isinstance(there, dict)):
            inner = {} if there == AUTO else there
            merged[name] = _merge(inner, value, f"{path}{name}.", default=default)
        elif value is not None and there == AUTO:
            merged[name] = value
        elif not default and value not in (None, there):
            raise WrapError(
                f"config: {path}{name} is {there!r}, the argument says {value!r}; expected one "
                'of them, or "auto" in config'
            )
    return merged


def _fill_batch_sizes(merged: Config, data_parallel_size: int) -> None:
    """Complete the three sizes, of which one follows from the others; DeepSpeed would round."""
    known: list[int | None] = []
    for name in (_MICRO, _STEPS, _TRAIN):
        value = merged.get(name, AUTO)
        if value != AUTO and (type(value) is not int or value < 1):
            raise WrapError(f"{name} is {value!r}; expected a whole number from 1")
        known.append(None if value == AUTO else value)
    micro, steps, train = known
    if train is not None:
        steps = steps or (1 if micro is None else train // (micro * data_parallel_size))
        micro = micro or train // (steps * data_parallel_size)
    steps, micro = 1 if steps is None else steps, 1 if micro is None else micro
    product = micro * steps * data_parallel_size
    if train not in (None, product):
        raise WrapError(
            f"{_TRAIN} is {train}; expected {_MICRO} {micro} x {_STEPS} {steps} x "
            f"{data_parallel_size} data-parallel ranks = {product}"
        )
    merged.update({_MICRO: micro, _STEPS: steps, _TRAIN: product})


def leaves_of(tree: Config, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield each value of a configuration that is no dict, with its path."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from leaves_of(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _check(merged: Config) -> None:
    zero = merged["zero_optimization"]
    stage = zero["stage"]
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise WrapError(f"zero_stage {stage!r}; expected 0, 1, 2 or 3")
    if merged["bf16"]["enabled"] and merged["fp16"]["enabled"]:
        raise WrapError("config: bf16.enabled and fp16.enabled are both true; expected one")
    for name, least in (("optimizer", 1), ("param", 3)):
        offload, key = zero.get(f"offload_{name}") or {}, f"zero_optimization.offload_{name}"
        target = offload.get("device", "none")
        if target not in ("none", "cpu", "nvme"):
            raise WrapError(f"{key}.device {target!r}; expected 'cpu' or 'nvme'")
        if target != "none" and stage < least:
            raise WrapError(
                f"{key} with zero_stage {stage}; expected stage "
                f"{'3' if least == 3 else '1, 2 or 3'}; stage {stage} keeps it whole on each rank"
            )
        if target == "nvme" and not offload.get("nvme_path"):
            raise WrapError(
                f"{key} to nvme without a folder; expected nvme_path, on a disk of this node"
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
    *, zero_stage: int | None = None, dtype: str | torch.dtype | None = None,
    micro_batch_size: int | None = None, gradient_accumulation_steps: int | None = None,
    gradient_clipping: float | None = None, offload_optimizer: str | None = None,
    offload_parameters: str | None = None, nvme_path: str | os.PathLike[str] | None = None,
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    training_data: Dataset[Any] | None = None, collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
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
        zero_stage, micro_batch_size, gradient_accumulation_steps: See `deepspeed_config`.
        gradient_clipping, offload_optimizer, offload_parameters, nvme_path, config: As well.
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
        ValueError: ``dtype`` is none of the three.
    """
    replicas = _replicas.find_replicas(_CALL)
    world, state = replicas.world, parallel_state()
    options: dict[str, Any] = {
        "zero_stage": zero_stage, "dtype": dtype, "micro_batch_size": micro_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "gradient_clipping": gradient_clipping,
        "offload_optimizer": offload_optimizer, "offload_parameters": offload_parameters,
    }  # fmt: skip
    given = {**options, "optimizer": optimizer, "scheduler": scheduler}
    with _replicas.agreed(_CALL, model, given, replicas) as lines:
        _check_deepspeed(world.device)
        _refuse(model, optimizer, replicas)
        settings = deepspeed_config(
            **options, nvme_path=nvme_path, config=config, device_type=world.device.type,
            data_parallel_size=world.info.world_size if state is None else state.size("data"),
        )  # fmt: skip
        _refuse_two(settings, optimizer, scheduler)
        if type(optimizer) in _ELEMENTWISE:
            settings.setdefault("zero_allow_untested_optimizer", True)
        # A file can differ between hosts.
        lines |= {f"config {name}": repr(value) for name, value in sorted(leaves_of(settings))}
    _prepare_deepspeed(world.info, world.device, world.backend)
    trained = None
    if settings.get("optimizer") or (optimizer and not isinstance(optimizer, Optimizer)):
        # For an optimizer that DeepSpeed makes; by default it takes frozen parameters too.
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    unit: Any = None  # what tells DeepSpeed of ezpz_tp's groups, where more than data is split
    if state and state.size("tensor") * state.size("pipeline") * state.size("context") > 1:
        import ezpz_tp.mpu as unit  # noqa: PLC0415  # only where its groups are used
    # DeepSpeed insists that it be LOCAL_RANK, which is the device's number: 0 on every rank where
    # each sees one device only.
    hidden = variables({"OMPI_COMM_WORLD_LOCAL_RANK": None})
    with waiting(f"deepspeed.initialize for {_CALL}", world, replicas.ranks), hidden:
        made = _import_deepspeed().initialize(
            model=model, optimizer=optimizer, model_parameters=trained, lr_scheduler=scheduler,
            training_data=training_data, collate_fn=collate_fn, mpu=unit,
            dist_init_required=False, config=settings,
        )  # fmt: skip
    # DeepSpeed gives all ranks the same parameters, and leaves buffers as each rank has them.
    _replicas.start_alike(list(model.buffers()), replicas)
    # For good: the engine's hooks stay on its parameters.
    _replicas.remember_inside(model, "DeepSpeed")
    return made[0], made[1], made[2], made[3]


def _refuse(model: nn.Module, optimizer: object, replicas: Members) -> None:
    _replicas.check_model(_CALL, model, replicas)
    if has_meta(model):
        raise WrapError(
            f"{type(model).__name__} has parameters on the meta device; expected real ones; for a "
            "model that is too large for one rank build it under deepspeed.zero.Init()"
        )
    if isinstance(optimizer, Optimizer):
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
