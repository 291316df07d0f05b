"""Reading a file of torch.save or safetensors, on one rank."""

from __future__ import annotations

import importlib
import pickle
import re
import zipfile
from typing import IO, Any, cast

import torch

from ezpz_dist._errors import CheckpointError
from ezpz_topo import get_hostname, get_rank

_REFUSED = re.compile(r"WeightsUnpickler error:\s*(\S.*)")
_GLOBAL = re.compile(r"GLOBAL (\S+)")
"""How torch says why it refuses a file, and what that wants to import."""


def read(path: str) -> Any:
    """Return what a file holds, its tensors on the host; no code of the file's is run."""
    if path.endswith(".safetensors"):
        return _read_safetensors(path)
    if "://" in path:
        with _open_url(path) as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    # Mapped, the file is read tensor by tensor as it is sent; old formats cannot be.
    mapped = zipfile.is_zipfile(path)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _read_safetensors(path: str) -> dict[str, torch.Tensor]:
    try:
        safetensors = importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise CheckpointError(f"{error}; pip install safetensors") from error
    if "://" in path:
        with _open_url(path) as file:
            return cast("dict[str, torch.Tensor]", safetensors.load(file.read()))
    return cast("dict[str, torch.Tensor]", safetensors.load_file(path))


def _open_url(path: str) -> IO[bytes]:
    return cast("IO[bytes]", importlib.import_module("fsspec").open(path, "rb").open())


def explain(path: str, error: Exception) -> CheckpointError:
    """Return what every rank raises for an error of `read`."""
    where = f"rank {get_rank()} on {get_hostname()} cannot load {path}"
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if isinstance(error, pickle.UnpicklingError):
        refused, wants = _REFUSED.search(str(error)), _GLOBAL.search(str(error))
        what = f"it asks for {wants[1]}" if wants else refused[1] if refused else text
        return CheckpointError(
            f"{where}: {what}, and what it holds beyond tensors and plain values could run code; "
            "nothing of it was run; expected a state dict; save model.state_dict(), or allow a "
            "class that you trust by torch.serialization.add_safe_globals"
        )
    return CheckpointError(f"{where}: {text}; expected a file of torch.save or of safetensors")
