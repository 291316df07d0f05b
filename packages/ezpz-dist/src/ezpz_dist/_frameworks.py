"""DeepSpeed and Horovod: imported only when requested, and made to see our world."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import torch

from ezpz_topo import RankInfo

from ._errors import SetupError

logger = logging.getLogger(__name__)

FRAMEWORKS = ("DDP", "deepspeed", "horovod")
"""What `setup_torch` can be told to set up; the first is torch itself."""

_SHARED_MEMORY = "deepspeed_shm_comm"
"""DeepSpeed's own all-reduce among the CPUs of a node; only its inference engine calls it."""

_undo: dict[str, Callable[[], None]] = {}
"""By framework that is ready, how its traces are removed."""


def check_framework(name: str, device: torch.device) -> None:
    """Import a framework and see that it can be used here, before any rank waits for another.

    Args:
        name: One of `FRAMEWORKS`.
        device: What this rank computes on.

    Raises:
        SetupError: It is not known, not installed, broken, or computes on another device.
    """
    if name not in FRAMEWORKS:
        raise SetupError(f"framework {name!r}; expected one of {', '.join(FRAMEWORKS)}")
    if name == "deepspeed":
        _check_deepspeed(device)
    elif name == "horovod":
        _import_horovod()


def prepare_framework(name: str, info: RankInfo, device: torch.device, backend: str) -> None:
    """Have a framework use the default process group that exists. Twice is the same as once.

    To be called after `check_framework`, once the group and torchrun's variables are there.
    Collective: every rank calls this.

    Args:
        name: One of `FRAMEWORKS`.
        info: This rank's place.
        device: What this rank computes on.
        backend: The default group's: ``"gloo"``, ``"nccl"``, ...

    Raises:
        SetupError: Horovod sees another world than ours.
    """
    if name in _undo:
        return
    if name == "deepspeed":
        _undo[name] = _prepare_deepspeed(info, device, backend)
    elif name == "horovod":
        _undo[name] = _prepare_horovod(info)


def leave_frameworks() -> None:
    """Remove what `prepare_framework` set; for clean-up. Nothing is sent."""
    while _undo:
        _undo.popitem()[1]()


def _check_deepspeed(device: torch.device) -> None:
    asked = os.environ.get("DS_ACCELERATOR", device.type)
    if asked != device.type:
        raise SetupError(
            f"DS_ACCELERATOR={asked!r} while this rank computes on {device.type}; expected the "
            f"same; unset DS_ACCELERATOR, or export TORCH_DEVICE={asked}"
        )
    # It looks for devices while it is imported, and keeps to what it found.
    with _variables({"DS_ACCELERATOR": device.type}):
        deepspeed = _import_deepspeed()
        found = deepspeed.accelerator.get_accelerator().device_name()
    if found != device.type:
        raise SetupError(
            f"DeepSpeed chose {found} when it was imported, and this rank computes on "
            f"{device.type}; expected the same; import deepspeed after setup_torch, or export "
            f"DS_ACCELERATOR={device.type} before"
        )


def _import_deepspeed() -> ModuleType:
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise SetupError(_broken("DeepSpeed", error)) from error
        raise SetupError(
            "DeepSpeed is not installed (no module named 'deepspeed'); expected it with "
            'framework="deepspeed"; pip install deepspeed'
        ) from error
    except Exception as error:  # an old DeepSpeed fails on a new torch in many ways, all at import
        raise SetupError(_broken("DeepSpeed", error)) from error
    return deepspeed


def _broken(what: str, error: Exception) -> str:
    said = " ".join(str(error).split())
    return (
        f"{what} is installed and cannot be imported with torch {torch.__version__} "
        f"({type(error).__name__}: {said}); expected a release that fits this torch; "
        f"pip install --upgrade {what.lower()}"
    )


def _prepare_deepspeed(info: RankInfo, device: torch.device, backend: str) -> Callable[[], None]:
    deepspeed = _import_deepspeed()
    with contextlib.ExitStack() as made:
        # Its processes (data loaders that are spawned) are to choose the same device.
        made.enter_context(_variables({"DS_ACCELERATOR": device.type}))
        if "LOCAL_RANK" not in os.environ:
            # A world of one exports nothing, and DeepSpeed reads this one. Without the other
            # two it would be half of a launcher's set.
            alone = {"RANK": info.rank, "WORLD_SIZE": info.world_size, "LOCAL_RANK": 0}
            made.enter_context(_variables({name: str(value) for name, value in alone.items()}))
        if device.type == "cpu":
            _spare_the_compiler(deepspeed)
        # Without the discovery switched off, it would start MPI and overwrite MASTER_ADDR and
        # MASTER_PORT wherever one of torchrun's variables is missing (deepspeed/comm/comm.py).
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
        made.callback(_forget_groups, deepspeed)
        undo = made.pop_all().close
    logger.debug("DeepSpeed %s on %s takes the process group", deepspeed.__version__, device.type)
    return undo


def _spare_the_compiler(deepspeed: ModuleType) -> None:
    """Leave out what DeepSpeed would compile for every process group on the CPU.

    The build of its all-reduce over shared memory takes minutes, leaves a folder in the home
    folder, waits for ever if an earlier build was killed (torch's lock file), and training
    does not call it. One that was built with DeepSpeed (``DS_BUILD_SHM_COMM=1``) stays.
    """
    installed = importlib.import_module("deepspeed.git_version_info").installed_ops
    if not installed.get(_SHARED_MEMORY):
        deepspeed.ops.__compatible_ops__[_SHARED_MEMORY] = False


def _forget_groups(deepspeed: ModuleType) -> None:
    """Have DeepSpeed forget the groups that end with ours: it would use them after a new set-up."""
    groups = deepspeed.utils.groups
    forget = getattr(groups, "_release_process_group_references", None)
    if forget is not None:  # what its own destroy_process_group calls (0.19.8)
        forget()


def _import_horovod() -> ModuleType:
    said = io.StringIO()
    try:
        # Where its library was not built it prints so, and can be imported without it.
        with contextlib.redirect_stdout(said):
            horovod = importlib.import_module("horovod.torch")
    except Exception as error:  # one that was built for another torch fails in many ways
        raise SetupError(_no_horovod(str(error))) from error
    if not hasattr(horovod, "init"):
        raise SetupError(_no_horovod(said.getvalue() or "horovod.torch was built without torch"))
    return horovod


def _no_horovod(reason: str) -> str:
    return (
        f"Horovod cannot be imported ({' '.join(reason.split())}); expected horovod.torch with "
        'framework="horovod"; its last release, 0.28.1, does not build against torch 2.1 or later '
        '(C++17): use framework="DDP"'
    )


def _prepare_horovod(info: RankInfo) -> Callable[[], None]:
    horovod = _import_horovod()
    horovod.init()
    seen = horovod.rank(), horovod.size()
    if seen != (info.rank, info.world_size):
        raise SetupError(
            f"Horovod sees rank {seen[0]} of {seen[1]}, the launcher ({info.launcher}) says "
            f"{info.rank} of {info.world_size}; expected the same; build Horovod with the "
            "launcher's MPI, or start with horovodrun"
        )
    # It shuts itself down at exit; done here, it would wait for ranks that have failed.
    return lambda: None


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and bring back what they were."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
