# ruff: noqa: SLF001 - one room: a tracker's and a region's own parts; and nothing public asks torch
"""Named streams of random numbers: the same on all tensor-parallel ranks, or one for each.

Outside tensor-parallel regions the ranks of a tensor-parallel group draw the same numbers from
the default generator; inside, within `RngTracker.fork`, each draws its own. Names and seeds are
Megatron-LM's (megatron/core/tensor_parallel/random.py), so that its users find what they know.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ._current import index_or_alone
from ._errors import ParallelError
from ._state import ParallelState

States = dict[str, Tensor]
"""The state of a default generator by the type of its device."""


def default_states(device: torch.device | None) -> States:
    states = {"cpu": torch.get_rng_state()}
    device = device or _accelerator_in_use()
    if device is not None and device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(*_index(device))
    return states


def _accelerator_in_use() -> torch.device | None:
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    # torch.mps has no such question: it is ready where it is available.
    if getattr(module, "is_initialized", module.is_available)():
        return device
    return None


def _index(device: torch.device) -> tuple[torch.device, ...]:
    # Without one, the current device; torch.mps takes no argument that it would need.
    index: int | None = device.index
    if index is None:
        return ()
    return (device,)


def set_default_states(states: Mapping[str, Tensor], device: torch.device | None) -> None:
    for kind, state in states.items():
        if kind == "cpu":
            torch.set_rng_state(state)
        else:
            target = device or torch.device(kind)
            torch.get_device_module(target).set_rng_state(state, *_index(target))


def seeded_state(kind: str, seed: int) -> Tensor:
    return torch.Generator(kind).manual_seed(seed).get_state()


def derive_stream_seed(name: str, states: States) -> int:
    """Read the seed out of a stream's state: a generator keeps it however much was drawn."""
    kind, state = next(iter(states.items()))
    if kind != "cpu" and not torch.accelerator.is_available():
        raise ParallelError(f"the random stream {name!r} was saved on {kind}, which is not here")
    generator = torch.Generator(kind)
    generator.set_state(state)
    return generator.initial_seed()


def backward_id() -> int | None:
    """Return the number of the backward pass that runs in this thread, if any."""
    # torch.utils.checkpoint and torch.autograd.graph ask in the same way.
    task: int = torch._C._current_graph_task_id()
    if task == -1:
        return None
    return task


MODEL_PARALLEL_RNG = "model-parallel-rng"
DATA_PARALLEL_RNG = "data-parallel-rng"
EXPERT_PARALLEL_RNG = "expert-parallel-rng"
_TENSOR_OFFSET = 2718
_EXPERT_OFFSET = 1024


class RngTracker:
    """Named streams of random numbers, of which one at a time stands in for the default one.

    Both the CPU's default generator and the accelerator's are exchanged, each once it is in
    use: a stream that was added before the accelerator was initialized starts there from the
    same seed. torch.compile breaks its graph where a stream is exchanged.

    Args:
        device: The accelerator whose default generator is exchanged besides the CPU's; "cpu"
            for none. None stands for this machine's, as soon as something has initialized it.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device: torch.device | None = None
        if device is not None:
            self._device = torch.device(device)
        self._streams: dict[str, States] = {}
        self._current: str | None = None
        self._restored_in: int | None = None

    @property
    def current(self) -> str | None:
        """The stream that stands in for the default one, within `fork`; else None."""
        return self._current

    def is_initialized(self) -> bool:
        """Return whether there is any stream: added or set since the last reset."""
        return bool(self._streams)

    def reset(self) -> None:
        """Forget every stream."""
        self._refuse_inside_fork("reset()")
        self._streams = {}

    def add(self, name: str, seed: int) -> None:
        """Add a stream, which starts as the default one does after ``torch.manual_seed(seed)``.

        Raises:
            ParallelError: The name or the seed is taken: two streams of one seed are equal.
        """
        if name in self._streams:
            raise ParallelError(
                f"the random stream {name!r} exists already; choose another name, or reset() first"
            )
        for other, states in self._streams.items():
            if derive_stream_seed(other, states) == seed:
                raise ParallelError(
                    f"the random stream {other!r} has seed {seed} already; "
                    f"give {name!r} another one, or the two draw the same numbers"
                )
        self._streams[name] = {"cpu": seeded_state("cpu", seed)}

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draw from a named stream within the block; the default one goes on after it.

        Blocks may be nested, also with the name of the one outside, whose stream then goes on.

        Raises:
            ParallelError: There is no such stream. Or autograd recomputes a region in its
                backward pass without having restored the streams: it would draw other numbers
                than in the forward pass.
        """
        if backward_id() not in (None, self._restored_in):
            raise ParallelError(
                f"fork({name!r}) inside a backward pass: a region that was checkpointed is run "
                "again with random streams that have moved on, and would draw other numbers, as "
                "for dropout. Use ezpz_tp.checkpoint_activations, or torch.utils.checkpoint"
                ".checkpoint(..., use_reentrant=False, context_fn=ezpz_tp.rng_contexts)"
            )
        outer = self._current
        before = default_states(self._device)
        if outer is not None:
            self._streams[outer] = self._streams[outer] | before
        set_default_states(self._stream(name, before), self._device)
        self._current = name
        try:
            yield
        finally:
            after = default_states(self._device)
            self._streams[name] = self._streams[name] | {kind: after[kind] for kind in before}
            self._current = outer
            resumed = before
            if outer is not None:
                resumed = self._stream(outer, before)
            set_default_states(resumed, self._device)
        for late in after.keys() - before.keys():
            raise ParallelError(
                f"{late} was first used inside fork({name!r}), after its generator was to be "
                f"exchanged; initialize it before, or give RngTracker device={late!r}"
            )

    @property
    def states_(self) -> Mapping[str, Tensor]:
        """What `get_states` returns, to read: Megatron-LM's name. `set_states` changes them."""
        return MappingProxyType(self.get_states())

    def get_states(self) -> dict[str, Tensor]:
        """Return the state of every stream, to save with a checkpoint.

        Returns:
            CPU tensors of bytes, which ``torch.load(weights_only=True)`` reads. With an
            accelerator, its state has the stream's name, and the CPU's is ``name@cpu``. Without
            one the CPU's has the name.
        """
        found = {}
        for name, states in self._streams.items():
            # The stream in use is where the default generators are, not where it was taken up.
            if name == self._current:
                states = states | default_states(self._device)  # noqa: PLW2901
            accelerators = [state for kind, state in states.items() if kind != "cpu"]
            if accelerators:
                found[name] = accelerators[0]
            if "cpu" in states:
                found[f"{name}@cpu" if accelerators else name] = states["cpu"]
        return found

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Replace all streams by what `get_states` returned, of this package or Megatron-LM's.

        Raises:
            ParallelError: Called inside `fork`, or a state is an accelerator's and there is none.
        """
        self._refuse_inside_fork("set_states()")
        streams: dict[str, States] = {}
        cpu_bytes = torch.get_rng_state().numel()
        for key, state in states.items():
            name = key.removesuffix("@cpu")
            kind = "cpu"
            # No accelerator's state is as long as the CPU's Mersenne twister.
            if state.numel() != cpu_bytes:
                device = self._device
                # What torch names is what it was built for, also where there is none.
                if device is None and torch.accelerator.is_available():
                    device = torch.accelerator.current_accelerator()
                if device is None or device.type == "cpu":
                    raise ParallelError(
                        f"the state of random stream {key!r} has {state.numel()} bytes, the CPU's "
                        f"has {cpu_bytes}: it was saved on an accelerator and fits only there"
                    )
                kind = device.type
            streams.setdefault(name, {})[kind] = state.detach().cpu().clone()
        self._streams = streams
        # A checkpointing function of the user's own restores the streams before it recomputes.
        self._restored_in = backward_id()

    def _stream(self, name: str, kinds: Mapping[str, object]) -> States:
        """Return a stream's states for these types of device; it begins where it was not used."""
        states = self._streams.get(name)
        if states is None:
            raise ParallelError(
                f"there is no random stream {name!r}; known: {', '.join(self._streams) or 'none'}. "
                "Call seed_model_parallel(seed) or add(name, seed) first"
            )
        stream = {}
        for kind in kinds:
            if kind in states:
                stream[kind] = states[kind]
            else:
                stream[kind] = seeded_state(kind, derive_stream_seed(name, states))
        return stream

    def _refuse_inside_fork(self, what: str) -> None:
        if self._current is not None:
            raise ParallelError(f"{what} inside fork({self._current!r}); leave the fork first")


class _Recomputation:
    """Runs a region again with the streams of its first run; those of now come back after."""

    # Not a generator's context: backward may recompute a region several times.

    def __init__(self, tracker: RngTracker) -> None:
        self._tracker = tracker
        self._first_run = self._current_states()
        self._now: list[tuple[dict[str, States], str | None, int | None]] = []

    def _current_states(self) -> tuple[dict[str, States], str | None, int | None]:
        tracker = self._tracker
        return dict(tracker._streams), tracker._current, tracker._restored_in

    def _restore(self, streams: dict[str, States], current: str | None, task: int | None) -> None:
        tracker = self._tracker
        tracker._streams = dict(streams)
        tracker._current = current
        tracker._restored_in = task

    def __enter__(self) -> None:
        self._now.append(self._current_states())
        self._restore(*self._first_run[:2], backward_id())

    def __exit__(self, *_: object) -> None:
        self._restore(*self._now.pop())


def rng_contexts(
    tracker: RngTracker | None = None,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Give back a checkpointed region its random numbers when it is recomputed.

    For torch's ``checkpoint(..., use_reentrant=False, context_fn=ezpz_tp.rng_contexts)``, which
    sees to the default generators itself (``preserve_rng_state``). Not for code under
    torch.compile, which takes dispatch modes only.

    Args:
        tracker: Whose streams; those of `get_rng_tracker` if None.

    Returns:
        The contexts of the first run and of the recomputation.
    """
    return contextlib.nullcontext(), _Recomputation(tracker or _TRACKER)


def get_rng_tracker() -> RngTracker:
    """Return the tracker that everything uses that was not given another."""
    return _TRACKER


def seed_model_parallel(
    seed: int,
    *,
    state: ParallelState | None = None,
    tracker: RngTracker | None = None,
    tensor_rank: int | None = None,
    expert_rank: int | None = None,
    expert_tensor_rank: int | None = None,
) -> None:
    """Seed the default generators and the tracker's streams, as Megatron-LM does.

    Outside tensor-parallel regions every rank draws from ``seed``, which may differ between
    pipeline stages (Megatron-LM's training adds 100 for each). The stream "model-parallel-rng"
    gets ``seed + 2718 + tensor rank``, "data-parallel-rng" ``seed`` and "expert-parallel-rng"
    ``seed + 1024 + 100 * expert rank + expert tensor rank``; where the last would reach the
    seeds of "model-parallel-rng" (expert rank 17 on), 2**20 more.

    Args:
        seed: At least 0, the same on the ranks of a tensor-parallel group.
        state: Whose ranks; the default's if None.
        tracker: Whose streams are replaced; those of `get_rng_tracker` if None.
        tensor_rank, expert_rank, expert_tensor_rank: Instead of the state's.

    Raises:
        NotInitializedError: There are several ranks, no state, and no ranks were given.
        ValueError: The seed is negative, or leaves no room for the ranks' own.
    """
    if not 0 <= seed < 2**62:
        raise ValueError(f"seed_model_parallel: seed {seed}; expected 0 to 2**62 - 1")
    place = index_or_alone
    if state is not None:
        place = state.index
    given = {"tensor": tensor_rank, "expert": expert_rank, "expert_tensor": expert_tensor_rank}
    ranks = {axis: place(axis) if rank is None else rank for axis, rank in given.items()}
    expert_offset = _EXPERT_OFFSET + 100 * ranks["expert"] + ranks["expert_tensor"]
    if expert_offset >= _TENSOR_OFFSET:
        expert_offset += 2**20
    tracker = tracker or _TRACKER
    tracker.reset()
    torch.manual_seed(seed)
    tracker.add(DATA_PARALLEL_RNG, seed)
    tracker.add(MODEL_PARALLEL_RNG, seed + _TENSOR_OFFSET + ranks["tensor"])
    tracker.add(EXPERT_PARALLEL_RNG, seed + expert_offset)


def seed_as_megatron(
    seed: int,
    *,
    tensor_rank: int | None = None,
    expert_rank: int | None = None,
    expert_tensor_rank: int | None = None,
) -> None:
    """Do what `seed_model_parallel` does; with an accelerator the CPU's stream is left alone.

    As Megatron-LM's ``model_parallel_cuda_manual_seed``.
    """
    state = torch.get_rng_state()
    seed_model_parallel(
        seed,
        tensor_rank=tensor_rank,
        expert_rank=expert_rank,
        expert_tensor_rank=expert_tensor_rank,
    )
    if torch.accelerator.is_available():
        torch.set_rng_state(state)


_TRACKER = RngTracker()


# A number by which tensors of different ranks are compared without being sent.

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_A_TIME = 1 << 24  # elements whose products are in memory at once


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return a number of all bits and their places; 0-dim int64, on the tensor's device."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    columns = 1
    if tensor.dim():
        columns = tensor.shape[-1]
    bits = tensor.reshape(-1, columns) if tensor.numel() else tensor.reshape(0, max(columns, 1))
    bits = bits.view(_INTEGERS[bits.element_size()])
    weights = _weights(bits.shape[1], torch.int32, bits.device)
    # Overflow does no harm: it is the same everywhere.
    rows = bits.split(max(1, _AT_A_TIME // max(1, bits.shape[1])))
    sums = torch.cat([(some * weights).sum(1, dtype=torch.int64) for some in rows])
    return (sums * _weights(len(sums), torch.int64, bits.device)).sum()


def _weights(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number for each place, without a pattern by which moved values could cancel."""
    places = torch.arange(1, count + 1, dtype=dtype, device=device) * 1_640_531_527
    return (places ^ (places >> 15)) * 2 + 1


# Activation checkpointing that knows the random streams of tensor-parallel regions.

Result = TypeVar("Result")

_checkpointing = ContextVar("_checkpointing", default=False)


def checkpoint_activations(
    function: Callable[..., Result], *args: Any, tracker: RngTracker | None = None
) -> Result:
    """Run a function without keeping its activations; backward runs it again.

    torch's non-reentrant checkpointing, with the streams of `RngTracker` restored for the
    second run, so that dropout repeats itself in and outside tensor-parallel regions.

    Args:
        function: Takes ``args``; what it returns is returned.
        *args: Anything. Tensors among them are kept until backward.
        tracker: Whose streams are restored; those of `get_rng_tracker` if None.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    # The compiler keeps random numbers itself, and refuses contexts it cannot trace.
    if not torch.compiler.is_compiling():
        options["context_fn"] = functools.partial(rng_contexts, tracker)
    result: Result = torch_checkpoint(function, *args, **options)
    return result


def checkpoint(
    function: Callable[..., Result], distribute_saved_activations: bool, *args: Any
) -> Result:
    """Run `checkpoint_activations` with Megatron-LM's signature.

    Of ``distribute_saved_activations``, which changes no result, a warning says that it is without
    effect: under sequence parallelism a rank keeps a part of them anyway.
    """
    if distribute_saved_activations:
        warnings.warn(
            "checkpoint(distribute_saved_activations=True) is without effect: each rank keeps the "
            "whole of its inputs; share them out by sequence parallelism",
            stacklevel=2,
        )

    def noted(*args: Any) -> Result:
        before = _checkpointing.set(True)
        try:
            return function(*args)
        finally:
            _checkpointing.reset(before)

    return checkpoint_activations(function if torch.compiler.is_compiling() else noted, *args)


def is_checkpointing() -> bool:
    """Return whether a region of `checkpoint` runs, for the first time or again."""
    return _checkpointing.get()
