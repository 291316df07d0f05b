"""The time of a training step and its phases, its rates, and the memory it takes."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ._context import find_rank_info
from ._errors import ObsError

if TYPE_CHECKING:
    from ezpz_device import Clock

_GIB = float(1 << 30)
# The first works from a clone today, the second needs the packages on an index.
_INSTALL = "ezpz_install ezpz-device in a clone, once released pip install 'ezpz-obs[device]'"


def memory_metrics(device: Any = None) -> dict[str, float]:
    """Return what this process has of its device's memory. Does not wait for the device.

    The high-water mark is the most since the start, or ``ezpz_device.reset_peak_memory()``.

    Args:
        device: Default: the one in use, see ``ezpz_device.get_memory``.

    Returns:
        ``memory_gib``, in tensors (of a CPU the process's resident memory);
        ``memory_peak_gib``, the most of that; ``memory_fraction``, what part of the device's
        memory the most was. Unknown values are left out: MPS keeps no peak.

    Raises:
        ObsError: torch is not imported, or ezpz_device not installed.
        ezpz_device.DeviceError: The device cannot be used.
    """
    if "torch" not in sys.modules:
        raise ObsError("memory_metrics() asks torch, which is not imported; import it first")
    memory = _import_device_package("memory_metrics()").get_memory(device)
    found = {}
    if memory.allocated is not None:
        found["memory_gib"] = memory.allocated / _GIB
    if memory.peak is not None:
        found["memory_peak_gib"] = memory.peak / _GIB
        found["memory_fraction"] = memory.peak / memory.total
    return found


def _import_device_package(purpose: str) -> Any:
    try:
        import ezpz_device  # an extra, and imports torch
    except ModuleNotFoundError as error:
        raise ObsError(
            f"{purpose} needs ezpz_device, which is not installed; {_INSTALL}"
        ) from error
    return ezpz_device


logger = logging.getLogger("ezpz_obs")


@dataclass(kw_only=True, eq=False)
class Throughput:
    """Rates of a training run, from the seconds of its steps.

    What a step is of (tokens, samples, operations) is counted over the whole job: all ranks, all
    micro-batches.

    >>> rates = Throughput(tokens_per_step=4096, flops_per_token=6e9, peak_flops=312e12)
    >>> rates.metrics(0.25)
    {'tokens_per_s': 16384.0, 'tflops': 98.304, 'mfu': 0.3150769230769231}

    Args:
        tokens_per_step: Tokens of one step.
        samples_per_step: Samples of one step.
        flops_per_token: Floating-point operations that the model needs for one token, forward and
            backward: see `transformer_flops`.
        flops_per_step: The same of one step, instead.
        peak_flops: FLOP/s of one device at best; default: what ezpz_device knows of this one, or
            ``EZPZ_PEAK_FLOPS``. Without it there is no ``mfu``, and one warning.
        dtype: What the matrix products are of, for the default of ``peak_flops``: "bf16", "fp16",
            "fp32", "tf32", "fp8", or a torch dtype.
        world_size: Devices that share the work; default: the job's ranks.

    Raises:
        ValueError: A count is no number above 0, or ``flops_per_token`` has no tokens.
    """

    tokens_per_step: float | None = None
    samples_per_step: float | None = None
    flops_per_token: float | None = None
    flops_per_step: float | None = None
    peak_flops: float | None = None
    dtype: Any = "bf16"
    world_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "dtype" and value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}={value}; expected a number above 0")
        if self.flops_per_token is not None and self.flops_per_step is not None:
            raise ValueError("flops_per_token and flops_per_step; expected one of them")

    def metrics(
        self, seconds: float | None, *, tokens: float | None = None, samples: float | None = None
    ) -> dict[str, float]:
        """Return the rates of one step.

        Args:
            seconds: The step's time, as of `StepTimer.seconds`; None: nothing is known yet.
            tokens: Of this step, over the whole job, where steps differ.
            samples: Of this step likewise.

        Returns:
            ``tokens_per_s`` and ``samples_per_s`` of the whole job. ``tflops`` is 10^12 operations
            a second of one device. ``mfu`` is the model FLOPs utilization (of the PaLM paper), the
            part of the device's peak. Unknown rates are left out.

        Raises:
            ValueError: ``seconds`` is no number above 0, or there are operations a token and no
                tokens.
        """
        if seconds is None:
            return {}
        if not 0 < seconds < float("inf"):
            raise ValueError(f"seconds={seconds}; expected the time of a step, above 0")
        if tokens is None:
            tokens = self.tokens_per_step
        if samples is None:
            samples = self.samples_per_step
        rates: dict[str, float] = {}
        if tokens is not None:
            rates["tokens_per_s"] = tokens / seconds
        if samples is not None:
            rates["samples_per_s"] = samples / seconds
        flops = self._count_flops(tokens)
        if flops is not None:
            self.world_size = self.world_size or find_rank_info().world_size
            rate = flops / seconds / self.world_size
            rates["tflops"] = rate / 1e12
            if self._peak is not None:
                rates["mfu"] = rate / self._peak
        return rates

    def _count_flops(self, tokens: float | None) -> float | None:
        """Return the operations of one step of the whole job; None where they are not known."""
        if self.flops_per_token is None:
            return self.flops_per_step
        if tokens is None:
            raise ValueError("flops_per_token without tokens; give tokens_per_step or tokens")
        return self.flops_per_token * tokens

    @cached_property
    def _peak(self) -> float | None:
        """The device's peak, looked up once; None, with a warning, if it is unknown."""
        if self.peak_flops is not None:
            return self.peak_flops
        if "torch" not in sys.modules:
            logger.warning("no mfu: torch is not imported, so there is no device; give peak_flops")
            return None
        try:
            package = _import_device_package("a device's peak")
        except ObsError as error:
            logger.warning("no mfu: %s, or give peak_flops", error)
            return None
        peak: float | None = package.get_peak_flops(self.dtype)
        if peak is None:
            logger.warning(
                "no mfu: no peak of %s is known for %r; set EZPZ_PEAK_FLOPS, or give peak_flops "
                "(FLOP/s of one device)", self.dtype, package.get_device_properties()["name"],
            )  # fmt: skip
        return peak


def transformer_flops(parameters: int, layers: int, hidden: int, sequence: int) -> int:
    """Return the floating-point operations of a transformer for one token, forward and backward.

    ``6 N + 12 L D T``: two operations a parameter forward and four backward, and the attention's
    scores and sums over T positions (no discount for a causal mask). Operations that activation
    checkpointing repeats do not count: the model does not need them. As in appendix B of the
    PaLM paper (Chowdhery et al. 2022, arXiv:2204.02311).

    >>> transformer_flops(parameters=7_000_000_000, layers=32, hidden=4096, sequence=4096)
    48442450944

    Args:
        parameters: N, of the whole model; of a mixture of experts those that a token meets.
        layers: L.
        hidden: D, heads times the size of a head.
        sequence: T, tokens of a sequence.
    """
    return 6 * parameters + 12 * layers * hidden * sequence


Mark = Any  # a moment, as its clock keeps it
T = TypeVar("T")
_MOST_UNFINISHED = 64  # steps that a device may be behind; a queue holds fewer
_MOST_MARKS = 256  # uses of a phase within a step, before they are added up


class StepTimer:
    """Time the phases of a training step: data, forward, backward, optimizer, or any others.

    >>> timer = StepTimer()
    >>> for batch in timer.data([1, 2]):
    ...     with timer("forward"):
    ...         loss = batch * 2
    ...     timer.step()
    >>> sorted(timer.metrics())
    ['data_s', 'forward_s', 'step_s']

    On a CPU a phase costs less than a microsecond. On CUDA, ROCm and XPU events are recorded and
    nothing waits: `metrics` is of the last step that the device is through with, usually the one
    before. A phase used several times in a step (gradient accumulation) is added up; of a phase
    inside itself the outer one counts; a phase inside another counts in both. What ends in an
    exception counts too. For one thread.

    A device other than the CPU needs the clock of ezpz_device; `start`, `step` and the first
    phase raise `ObsError` where it is not installed.

    Args:
        synchronize: Wait for the device at both ends of a phase: exact times of the step that
            has just ended, and a queue that runs empty. MPS is always waited for.
        device: What the work runs on; default: the CUDA or XPU device that torch has
            initialized by the time, else the CPU. MPS is to be named.
    """

    def __init__(self, *, synchronize: bool = False, device: Any = None) -> None:
        self._synchronize = synchronize
        self._device = device
        self._clock: Clock = _HOST_CLOCK
        self._phases: dict[str, Phase] = {}
        self._start: Mark = None
        self._unfinished: deque[_Step] = deque()
        self._last: dict[str, float] = {}

    def __call__(self, phase: str) -> Phase:
        """Return a context manager that times a phase, such as ``forward``.

        Raises:
            ValueError: The phase is called ``step``, which is the whole.
        """
        found = self._phases.get(phase)
        if found is not None:
            return found
        if phase == "step":
            raise ValueError("phase 'step'; expected another name: step_s is the whole step's time")
        if self._start is None:
            self.start()
        return self._phases.setdefault(phase, Phase(self._clock))

    def data(self, batches: Iterable[T], phase: str = "data") -> Batches[T]:
        """Return the batches, timing the host's wait for each.

        Args:
            batches: A DataLoader, or any other iterable; it may be iterated again.
            phase: What the waiting is called.
        """
        return Batches(batches, self(phase))

    def start(self) -> None:
        """Begin a step now, and forget what has been timed since the last one ended.

        The first begins with the first phase, and each other where the one before ends. Call it
        after what belongs to no step: an evaluation, a checkpoint.
        """
        for phase in self._phases.values():
            phase.pop_marks()
        self._update_clock()
        self._start = self._clock.mark()

    def step(self) -> None:
        """End the step, and begin the next."""
        if self._start is None:
            self.start()
            return
        end = self._clock.mark()
        taken = {name: phase.pop_marks() for name, phase in self._phases.items()}
        self._unfinished.append(_Step(self._clock, self._start, end, taken))
        self._start = end
        self._collect_finished()
        if self._update_clock():
            self._start = self._clock.mark()

    def metrics(self) -> dict[str, float]:
        """Return the seconds of the last step that is known: ``step_s``, ``data_s``, ...

        Every phase has its place, with 0 where the step had none of it. Empty before the end of
        the first step, which is the only one that is waited for.
        """
        self._collect_finished(wait=not self._last)
        return dict(self._last)

    @property
    def seconds(self) -> float | None:
        """Seconds of the last step that is known, for `Throughput.metrics`; None before."""
        self._collect_finished(wait=not self._last)
        return self._last.get("step_s")

    def _collect_finished(self, *, wait: bool = False) -> None:
        while self._unfinished:
            first = self._unfinished[0]
            is_far_behind = len(self._unfinished) > _MOST_UNFINISHED
            if not wait and not is_far_behind and not first.clock.has_passed(first.end):
                return
            self._last = first.seconds()
            self._unfinished.popleft()

    def _update_clock(self) -> bool:
        """Use the device's clock once there is a device; return whether the clock is another."""
        if self._clock is not _HOST_CLOCK or any(phase.depth for phase in self._phases.values()):
            return False
        self._clock = _find_clock(self._device, synchronize=self._synchronize)
        for phase in self._phases.values():
            phase.clock = self._clock
        return self._clock is not _HOST_CLOCK


class HostClock:
    """The host's own clock, for as long as there is no device, and without torch."""

    mark = staticmethod(time.perf_counter)

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def has_passed(self, mark: float) -> bool:  # noqa: ARG002 - a host's marks are past
        return True


_HOST_CLOCK = HostClock()


def _find_clock(device: Any, *, synchronize: bool) -> Clock:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return _HOST_CLOCK
    if device is None:
        if not (torch.cuda.is_initialized() or torch.xpu.is_initialized()):
            return _HOST_CLOCK
    elif torch.device(device).type == "cpu":
        return _HOST_CLOCK
    package = _import_device_package(f"StepTimer on {device or 'an accelerator'}")
    found: Clock = package.find_clock(device, synchronize=synchronize)
    return found


class Phase:
    """One phase of a step: a context manager, used again and again."""

    __slots__ = ("_marks", "_start", "clock", "depth", "host_seconds")

    def __init__(self, clock: Clock) -> None:
        self.clock: Clock = clock
        self.depth: int = 0
        self.host_seconds: float = 0.0  # what needs no clock any more
        self._start: Mark = None
        self._marks: list[tuple[Mark, Mark]] = []

    def __enter__(self) -> None:
        if not self.depth:
            self._start = self.clock.mark()
        self.depth += 1

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.depth -= 1
        if self.depth:
            return
        if kind is None:
            self._marks.append((self._start, self.clock.mark()))
        else:
            # A failed device raises here, too, and the first error is the better one.
            with suppress(RuntimeError):
                self._marks.append((self._start, self.clock.mark()))
        if len(self._marks) >= _MOST_MARKS:
            clock = self.clock
            self.host_seconds += sum(clock.seconds(*pair) for pair in self._marks)
            self._marks = []

    def pop_marks(self) -> tuple[float, list[tuple[Mark, Mark]]]:
        """Return what has been timed, and begin again."""
        seconds = self.host_seconds
        marks = self._marks
        self.host_seconds = 0.0
        self._marks = []
        return seconds, marks


class _Step(NamedTuple):
    """A step that the device may not have finished."""

    clock: Clock
    start: Mark
    end: Mark
    taken: dict[str, tuple[float, list[tuple[Mark, Mark]]]]

    def seconds(self) -> dict[str, float]:
        seconds = self.clock.seconds
        times = {"step_s": seconds(self.start, self.end)}
        for name, (known, marks) in self.taken.items():
            times[f"{name}_s"] = known + sum(seconds(*pair) for pair in marks)
        return times


class Batches(Generic[T]):
    """Batches, the wait for each being timed."""

    def __init__(self, batches: Iterable[T], phase: Phase) -> None:
        self._batches = batches
        self._phase = phase

    def __iter__(self) -> Iterator[T]:
        phase = self._phase
        # Workers are started here: waiting too.
        begun = time.perf_counter()
        iterator = iter(self._batches)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                # Not by events: where the host waits the device may have much to do yet.
                phase.host_seconds += time.perf_counter() - begun
            yield batch
            begun = time.perf_counter()

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]
