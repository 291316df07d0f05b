"""What `ezpz doctor` checks of the device."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch exports it so

from ezpz_topo import Accelerators, CheckResult, TopoError, get_accelerators

from ._backend import ONECCL_MODULE, available_backends, get_torch_backend
from ._select import DeviceError, get_torch_device_type

_SIZE = 256

_BUILDS = {"cuda": "CUDA or ROCm", "xpu": "Intel GPUs", "mps": "Metal"}


def check(seconds: float, env: Mapping[str, str] | None = None, *, root: str = "/") -> CheckResult:
    """Compare torch's devices with the host's, multiply on each, and start their backend."""
    env = os.environ if env is None else env
    deadline = time.monotonic() + 0.7 * seconds
    try:
        host = get_accelerators(env, root=root)
        device_type = get_torch_device_type(env)
        backend = get_torch_backend(env)
    except (TopoError, DeviceError) as error:
        return CheckResult.of(error)
    facts: dict[str, object] = {
        "torch": torch.__version__, "backend": backend,
        "device_type": device_type, "count": count_devices(device_type),
        "host_device_type": host.device_type, "host_count": host.count, "host_source": host.source,
    }  # fmt: skip
    if device_type == "cpu" and host.device_type != "cpu":
        devices = f"{host.count} {host.device_type} devices"
        if host.count == 1:
            devices = f"1 {host.device_type} device"
        reason, remedy = _explain_unseen(host.device_type)
        message = f"this host has {devices} ({host.source}), and torch {torch.__version__} {reason}"
        return CheckResult.error(message, remedy, **facts)
    result = _check_devices(host, deadline, facts)
    if result.status == "error" or (device_type != "cpu" and time.monotonic() > deadline):
        return result
    problem = try_backend(backend, device_type, max(deadline - time.monotonic(), 1.0))
    if problem:
        return CheckResult.error(
            f"the backend {backend} of {device_type} does not start: {problem}",
            "see the check network; set TORCH_BACKEND to another: one of "
            f"{', '.join(available_backends())}",
            **facts,
        )
    return replace(result, message=f"{result.message}; {backend} starts")


def _check_devices(host: Accelerators, deadline: float, facts: dict[str, object]) -> CheckResult:
    device_type = str(facts["device_type"])
    if device_type == "cpu":
        return CheckResult.ok(
            f"none on this host ({host.source}): torch {torch.__version__} computes on the CPU",
            **facts,
        )
    count = count_devices(device_type)
    tried, problem = try_devices(device_type, count, deadline)
    if problem:
        return CheckResult.error(
            problem,
            "see what its vendor's tool says of it (nvidia-smi, rocm-smi, xpu-smi); leave it out "
            "by CUDA_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES or ZE_AFFINITY_MASK",
            **facts,
        )
    message = f"torch {torch.__version__} computes on {tried} of {count} {device_type} devices"
    if host.device_type == device_type and count < host.count:
        return CheckResult.warning(
            f"{message}; the host shows {host.count} ({host.source})",
            "see what its vendor's tool says of the others, and whether another job has them",
            **facts,
        )
    return CheckResult.ok(message, **facts)


def count_devices(device_type: str) -> int:
    """Return how many devices torch sees: one of Metal's, none of the CPU's."""
    if device_type == "cpu":
        return 0
    if device_type == "mps":
        return 1
    return int(getattr(torch, device_type).device_count())


def try_devices(device_type: str, count: int, deadline: float) -> tuple[int, str]:
    """Multiply on each device, the first one in any case; return how many, and the problem."""
    matrix = torch.arange(_SIZE * _SIZE, dtype=torch.float32).reshape(_SIZE, _SIZE) % 7
    # Small integers: exact in fp32, in TF32, and in whatever order they are added.
    expected = matrix @ matrix
    for index in range(count):
        if index and time.monotonic() > deadline:
            return index, ""
        device = f"{device_type}:{index}"
        if device_type == "mps":
            device = "mps"
        try:
            moved = matrix.to(device)
            product = (moved @ moved).cpu()
        except RuntimeError as error:  # torch's for every fault of a driver or device
            return index, f"{device} cannot multiply: {str(error).partition(chr(10))[0]}"
        if not torch.equal(product, expected):
            difference = (product - expected).abs().max().item()
            return index, f"{device} multiplies wrongly: off by {difference:g}"
    return count, ""


def try_backend(backend: str, device_type: str, seconds: float) -> str:
    """Start the backend in a world of one and add up; return the problem, empty without one."""
    if backend == "mpi":
        return ""  # its world is that of its launcher, and the check "mpi" starts one
    try:
        if backend == "ccl":
            importlib.import_module(ONECCL_MODULE)
        dist.init_process_group(
            backend, store=HashStore(), rank=0, world_size=1,
            timeout=timedelta(seconds=seconds),
        )  # fmt: skip
        try:
            tensor = torch.full((1,), 3.0, device=device_type)
            dist.all_reduce(tensor)
            total = tensor.item()
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError, ImportError) as error:  # torch's, and its plug-in's
        return str(error).partition("\n")[0]
    if total != 3.0:
        return f"the sum of 3 alone is {total:g}"
    return ""


def _explain_unseen(device_type: str) -> tuple[str, str]:
    """Return why torch does not see a type of device that the host has, and the remedy."""
    if not has_support(device_type):
        return f"is built without {_BUILDS[device_type]}", (
            f"install a torch for {_BUILDS[device_type]} (pytorch.org, Get Started), or load the "
            "site's module; to compute on the CPU on purpose: export TORCH_DEVICE=cpu"
        )
    reason = "sees none of them"
    if device_type == "cuda":
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # both are torch's own
            reason = f"cannot use it: {str(error).partition(chr(10))[0]}"
    return reason, "update the driver, or install a torch for the one that is here: see nvidia-smi"


def has_support(device_type: str) -> bool:
    """Return whether this torch is built with support for a type of device."""
    if device_type == "cuda":
        return torch.version.cuda is not None or torch.version.hip is not None
    if device_type == "xpu":
        return bool(torch.xpu._is_compiled())  # noqa: SLF001  # there is no public name for it
    return bool(torch.backends.mps.is_built())
