"""Named streams of random numbers: the same on all tensor-parallel ranks, or one for each.

Outside tensor-parallel regions the ranks of a tensor-parallel group draw the same numbers from
the default generator; inside, within `RngTracker.fork`, each draws its own. Names and seeds are
Megatron-LM's (megatron/core/tensor_parallel/random.py), so that its users find what they know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType, TracebackType

import torch
from torch import Tensor

from ezpz_tp._errors import ParallelError
from ezpz_tp._groups.default import index_or_alone
from ezpz_tp._groups.state import ParallelState

from .generators import (
    States,
    backward_id,
    default_states,
    seed_of,
    seeded_state,
    set_default_states,
)

MODEL_PARALLEL_RNG = "model-parallel-rng"
DATA_PARALLEL_RNG = "data-parallel-rng"
EXPERT_PARALLEL_RNG = "expert-parallel-rng"

_TENSOR_OFFSET = 2718
_EXPERT_OFFSET = 1024
_SEEDS = 2**62
_CLEAR_OF_TENSOR_OFFSETS = 1 << 20


_Snapshot = tuple[dict[str, States], str | None]


class RngTracker:
    """Named streams of random numbers, of which one at a time stands in for the default one.

    Both the CPU's default generator and the accelerator's are exchanged, each once it is in
    use: a stream that was added before the accelerator was initialized starts there from the
    same seed. Ranks that are threads of one process share torch's generators, and so cannot
    use this; torch.compile breaks its graph where a stream is exchanged.

    Args:
        device: The accelerator whose default generator is exchanged besides the CPU's; "cpu"
            for none. None stands for this machine's, as soon as something has initialized it.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = None if device is None else torch.device(device)
        self._streams: dict[str, States] = {}
        self._current: str | None = None
        self._restored_in: int | None = None
        self._is_initialized = False

    @property
    def current(self) -> str | None:
        """The stream that stands in for the default one, within `fork`; else None."""
        return self._current

    def is_initialized(self) -> bool:
        """Return whether any stream was added or set since the last reset."""
        return self._is_initialized

    def reset(self) -> None:
        """Forget every stream."""
        self._refuse_inside_fork("reset()")
        self._streams = {}
        self._is_initialized = False

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
            if seed_of(other, states) == seed:
                raise ParallelError(
                    f"the random stream {other!r} has seed {seed} already; "
                    f"give {name!r} another one, or the two draw the same numbers"
                )
        self._streams[name] = {"cpu": seeded_state("cpu", seed)}
        self._is_initialized = True

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draw from a named stream within the block; the default one goes on after it.

        Blocks may be nested, also with the name of the one outside, whose stream then goes on.

        Raises:
            ParallelError: There is no such stream. Or autograd recomputes a region in its
                backward pass without having restored the streams: it would draw other numbers
                than in the forward pass.
        """
        self._refuse_stray_recomputation(name)
        outer, before = self._current, default_states(self._device)
        if outer is not None:
            self._streams[outer] = self._streams[outer] | before
        set_default_states(self._stream(name, before), self._device)
        self._current = name
        late: list[str] = []
        try:
            yield
        finally:
            after = default_states(self._device)
            late += after.keys() - before.keys()
            self._streams[name] = self._streams[name] | {kind: after[kind] for kind in before}
            self._current = outer
            resumed = before if outer is None else self._stream(outer, before)
            set_default_states(resumed, self._device)
        if late:
            raise ParallelError(
                f"{late[0]} was first used inside fork({name!r}), after its generator was to be "
                f"exchanged; initialize it before, or give RngTracker device={late[0]!r}"
            )

    @property
    def states_(self) -> Mapping[str, Tensor]:
        """What `get_states` returns, to read: Megatron-LM's name. `set_states` changes them."""
        return MappingProxyType(self.get_states())

    def get_states(self) -> dict[str, Tensor]:
        """Return the state of every stream, to save with a checkpoint.

        Returns:
            CPU tensors of bytes, which ``torch.load(weights_only=True)`` reads: the accelerator's
            state by the stream's name where there is one, with the CPU's beside it as
            ``name@cpu``; else the CPU's by name.
        """
        found = {}
        for name, kept in self._streams.items():
            # The stream in use is where the default generators are, not where it was taken up.
            states = kept
            if name == self._current:
                states = kept | default_states(self._device)
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
            name, kind = key.removesuffix("@cpu"), "cpu"
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
        self._is_initialized = True
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
        return {
            kind: states[kind] if kind in states else seeded_state(kind, seed_of(name, states))
            for kind in kinds
        }

    def _snapshot(self) -> _Snapshot:
        return dict(self._streams), self._current

    def _restore(self, snapshot: _Snapshot) -> None:
        streams, self._current = snapshot
        self._streams = dict(streams)

    def _refuse_inside_fork(self, what: str) -> None:
        if self._current is not None:
            raise ParallelError(f"{what} inside fork({self._current!r}); leave the fork first")

    def _refuse_stray_recomputation(self, name: str) -> None:
        task = backward_id()
        if task not in (None, self._restored_in):
            raise ParallelError(
                f"fork({name!r}) inside a backward pass: a region that was checkpointed is run "
                "again with random streams that have moved on, and would draw other numbers, as "
                "for dropout. Use ezpz_tp.checkpoint_activations, or torch.utils.checkpoint"
                ".checkpoint(..., use_reentrant=False, context_fn=ezpz_tp.rng_contexts)"
            )


class _Recomputation:
    """Runs a region again with the streams of its first run; those of now come back after.

    Not a generator's context: backward may recompute a region several times.
    """

    def __init__(self, tracker: RngTracker) -> None:
        self._tracker = tracker
        self._first_run = tracker._snapshot()  # noqa: SLF001
        self._now: list[tuple[_Snapshot, int | None]] = []

    def __enter__(self) -> None:
        tracker = self._tracker
        self._now.append((tracker._snapshot(), tracker._restored_in))  # noqa: SLF001
        tracker._restore(self._first_run)  # noqa: SLF001
        tracker._restored_in = backward_id()  # noqa: SLF001

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        snapshot, self._tracker._restored_in = self._now.pop()  # noqa: SLF001
        self._tracker._restore(snapshot)  # noqa: SLF001


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
        tensor_rank: Instead of the state's; the same for the other two.
        expert_rank: See above.
        expert_tensor_rank: See above.

    Raises:
        NotInitializedError: There are several ranks, no state, and no ranks were given.
        ValueError: The seed is negative, or leaves no room for the ranks' own.
    """
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"seed_model_parallel: seed {seed}; expected 0 to 2**62 - 1")
    place = index_or_alone if state is None else state.index
    if tensor_rank is None:
        tensor_rank = place("tensor")
    if expert_rank is None:
        expert_rank = place("expert")
    if expert_tensor_rank is None:
        expert_tensor_rank = place("expert_tensor")
    expert_offset = _EXPERT_OFFSET + 100 * expert_rank + expert_tensor_rank
    if expert_offset >= _TENSOR_OFFSET:
        expert_offset += _CLEAR_OF_TENSOR_OFFSETS
    tracker = tracker or _TRACKER
    tracker.reset()
    torch.manual_seed(seed)
    tracker.add(DATA_PARALLEL_RNG, seed)
    tracker.add(MODEL_PARALLEL_RNG, seed + _TENSOR_OFFSET + tensor_rank)
    tracker.add(EXPERT_PARALLEL_RNG, seed + expert_offset)


def seed_as_megatron(
    seed: int,
    *,
    tensor_rank: int | None = None,
    expert_rank: int | None = None,
    expert_tensor_rank: int | None = None,
) -> None:
    """Do what `seed_model_parallel` does, and leave the CPU's default stream where it is.

    As Megatron-LM's ``model_parallel_cuda_manual_seed``: that stream is ``torch.manual_seed``'s.
    Without an accelerator the CPU's stands for the accelerator's, and is seeded.
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
