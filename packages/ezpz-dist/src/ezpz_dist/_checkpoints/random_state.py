"""The streams of random numbers of a rank."""

from __future__ import annotations

import hashlib
import random
import sys
from itertools import chain
from typing import Any

import torch
from torch import nn

import ezpz_tp
from ezpz_dist._setup import seed_generators
from ezpz_dist._world import World


def find_device(model: nn.Module, world: World | None) -> torch.device:
    """Return the device whose stream a rank draws from: without `setup_torch` the model's."""
    if world is not None:
        return world.device
    for tensor in chain(model.parameters(), model.buffers()):
        if not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")


def get_rng_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if device.type != "cpu":
        stream = torch.get_device_module(device).get_rng_state(device)
        state["device"] = (device.type, stream)
    tracker = ezpz_tp.get_rng_tracker()
    if tracker.is_initialized():
        state["ezpz_tp"] = tracker.get_states()
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> list[str]:
    """Put this rank's streams where they were. Return notes on those that could not be."""
    notes = []
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    elif numpy is not None:
        notes.append("numpy's random numbers stay as they are: it was not imported at the save")
    if device.type != "cpu":
        kind, stream = state.get("device", ("cpu", None))
        if kind == device.type:
            torch.get_device_module(device).set_rng_state(stream, device)
        else:
            notes.append(f"random numbers on {device.type} stay as they are: saved on {kind}")
    if "ezpz_tp" in state:
        ezpz_tp.get_rng_tracker().set_states(state["ezpz_tp"])
    return notes


def derive_rng_state(saved: bytes, place: tuple[int, ...]) -> None:
    """Seed the streams of a rank that was not there, from the state of rank 0.

    Args:
        saved: The state of rank 0. The same state gives the same streams.
        place: The rank's place among those that draw other numbers.
    """
    # Not seeds of `seed_for_rank`: those have been drawn from already.
    digest = hashlib.sha256(saved + repr(place).encode()).digest()
    seed = int.from_bytes(digest[:8], "little") >> 4
    seed_generators(seed)
    if ezpz_tp.get_rng_tracker().is_initialized():
        ezpz_tp.seed_model_parallel(seed)
