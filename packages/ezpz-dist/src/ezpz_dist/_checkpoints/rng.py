"""The streams of random numbers of a rank."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

from ezpz_dist._world import World


def rng_state(world: World | None) -> dict[str, Any]:
    """Return where this rank's streams are: Python's, numpy's, torch's, the device's, ezpz_tp's."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if world is not None and world.device.type != "cpu":
        module = torch.get_device_module(world.device)
        state["device"] = (world.device.type, module.get_rng_state())
    if tp := sys.modules.get("ezpz_tp"):
        tracker = tp.get_rng_tracker()
        if tracker.is_initialized():
            state["ezpz_tp"] = tracker.get_states()
    return state


def set_rng_state(state: dict[str, Any], world: World | None) -> list[str]:
    """Put this rank's streams where they were; return notes on those that could not be."""
    notes = []
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    elif numpy:
        notes.append("numpy's random numbers go on as they are: it was not imported at the save")
    if world is not None and world.device.type != "cpu":
        kind, held = state.get("device", ("cpu", None))
        if kind == world.device.type:
            torch.get_device_module(world.device).set_rng_state(held)
        else:
            notes.append(
                f"random numbers on {world.device.type} go on as they are: saved on {kind}"
            )
    if "ezpz_tp" in state:
        from ezpz_tp import get_rng_tracker  # noqa: PLC0415 - only where it was used

        get_rng_tracker().set_states(state["ezpz_tp"])
    return notes


def derive_rng_state(saved: bytes, stream: tuple[int, ...]) -> None:
    """Seed the streams of a rank that was not there, from the state of rank 0.

    The same on every run. Not seeds of `seed_for_rank`: those have been drawn from already.

    Args:
        saved: Rank 0's state, in bytes.
        stream: What tells this rank from others; the same on tensor-parallel ranks.
    """
    digest = hashlib.sha256(saved + repr(stream).encode()).digest()
    value = int.from_bytes(digest[:8], "little") >> 4
    random.seed(value)
    torch.manual_seed(value)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed([value & 0xFFFFFFFF, value >> 32])
    tp = sys.modules.get("ezpz_tp")
    if tp and tp.get_rng_tracker().is_initialized():
        tp.seed_model_parallel(value)
