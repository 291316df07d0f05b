"""A model split by its layers over the ranks of a pipeline, and its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._groups.default import current_state, index_or_alone, size_or_alone
from ezpz_tp._groups.state import ParallelState

from .chunk import Chunk, Given, Tensors
from .layers import ranges_of
from .module import joined
from .relay import run_chunks
from .schedule import check_schedule, torch_schedule
from .trial import Trial, device_of


class Pipeline:
    """This rank's part of a model that is split by its layers, and the steps of its training.

    No rank builds the whole model. Each builds its chunks, contiguous ranges of layers: one, or
    ``virtual`` of them for the interleaved schedule, chunk c on rank ``c % ranks``. torch's
    schedules (``torch.distributed.pipelining``) run them over the pipeline group of a state:

    * ``gpipe``: all microbatches forward, then all backward (Huang et al., arXiv:1811.06965);
    * ``1f1b``: one forward, one backward, which keeps at most as many microbatches' activations
      as there are ranks (Narayanan et al., arXiv:1806.03377);
    * ``interleaved``: 1F1B over ``virtual`` chunks a rank, with less idle time and more
      communication (Narayanan et al., arXiv:2104.04473).

    A pipeline of one rank has one chunk, and accumulates the microbatches' gradients: the same
    code runs without a pipeline, bit for bit what a loop over microbatches gives. Call
    `finalize_grads` after a step for what is summed over other axes: DistributedDataParallel
    does not go with several microbatches in flight.

    Attributes:
        module: This rank's part of the model, with the names that ``build`` gave. For the
            optimizer, `finalize_grads`, `clip_grad_norm_`, state dicts, ``train`` and ``eval``.
        layers: The layers of each of this rank's chunks.
        is_first: Whether this rank has the first chunk, which takes the inputs.
        is_last: Whether this rank has the last chunk, which the loss is computed of.
    """

    def __init__(
        self,
        build: Callable[..., nn.Module],
        *,
        layers: int | Sequence[range],
        microbatches: int,
        loss: Callable[..., Tensor],
        schedule: str = "1f1b",
        virtual: int = 1,
        state: ParallelState | None = None,
    ) -> None:
        """Build this rank's chunks. Nothing is sent before the first step.

        Args:
            build: Called as ``build(layers=range, first=bool, last=bool)`` for each chunk of
                this rank, returns its module: with the embedding if ``first``, with the head if
                ``last``. Its forward takes what the chunk before returned: a tensor, or a tuple
                of tensors as so many arguments. Name layers by their number in the whole model.
            layers: Number of layers of the model; or the ranges of all chunks, in order, where
                an even split does not do.
            microbatches: How many equal parts of its first dim a batch is run in.
            loss: ``loss(output, targets)`` of the last chunk's output: 0-dim, the mean over a
                microbatch. What is differentiated is the mean over the microbatches.
            schedule: ``gpipe``, ``1f1b`` or ``interleaved``.
            virtual: Chunks a rank; at least 2 for ``interleaved``, 1 for the others.
            state: Whose pipeline group; the default's if None.

        Raises:
            DegreeError: There are fewer layers than chunks, or the schedule does not go with so
                many microbatches or chunks.
            ParallelError: ``build`` returns what is no module; or two chunks use one name.
            NotInitializedError: There are several ranks, and no parallel groups.
        """
        state = state or current_state()
        degree = size_or_alone("pipeline") if state is None else state.size("pipeline")
        place = index_or_alone("pipeline") if state is None else state.index("pipeline")
        check_schedule(schedule, virtual, microbatches, degree)
        self._total = 1 if degree == 1 else degree * virtual
        ranges = ranges_of(layers, self._total)
        self._group = None if state is None or degree == 1 else _known(state.group("pipeline"))
        self._kind, self._microbatches = schedule, microbatches
        numbers = range(place, self._total, degree)
        modules = []
        self._chunks: dict[int, Chunk] = {}
        for number in numbers:
            module = _built(build, ranges[number], number, self._total)
            modules.append(module)
            self._chunks[number] = Chunk(module, number, self._total, loss, microbatches)
        self.module: nn.Module = joined(modules)
        self.layers: tuple[range, ...] = tuple(ranges[number] for number in numbers)
        self.is_first: bool = 0 in numbers
        self.is_last: bool = self._total - 1 in numbers
        self._trial: Trial | None = None
        self._schedule: Any = None

    def step(self, inputs: Given | None = None, targets: Given | None = None) -> Tensor | None:
        """Run a batch forward and backward, adding to the parameters' gradients.

        The first step begins with a trial: one microbatch goes forward through the pipeline, so
        that every rank learns the shapes of what it will receive. Random streams and buffers are
        put back after it. Later steps must have the first one's shapes, until `forget_shapes`.

        Collective: every rank of the pipeline calls this (and with it the ranks of the groups
        that the model's layers communicate in).

        Args:
            inputs: ``[batch, ...]``, or several such tensors, which are the first chunk's
                arguments. Ignored, and may be None, on ranks without the first chunk.
            targets: ``[batch, ...]``, or several such tensors, which ``loss`` takes after the
                output. Ignored, and may be None, on ranks without the last chunk.

        Returns:
            The losses ``[microbatches]``, without gradients, on ranks with the last chunk; None
            on others.

        Raises:
            DegreeError: The number of microbatches does not divide the batch, or an input's shape
                is not the first step's.
            ParallelError: A rank lacks what it needs; or a chunk or the loss returns what cannot
                be used, or what the first step did not have.
        """
        batches = self._split(inputs, "inputs", self.is_first)
        expected = self._split(targets, "targets", self.is_last)
        if self._group is None:
            self._expect(expected)
            for batch in batches:
                for part in self._chunks[0](*batch):
                    part.backward()
            return self._losses()
        if self._trial is None:
            self._trial = Trial(self._chunks, self._total, batches[0], expected[0], self._group)
            self._schedule = torch_schedule(
                self._kind,
                self._trial,
                self._chunks,
                self._total,
                self._microbatches,
                self._group,
            )
        self._trial.check(batches[0])
        self._expect(expected)
        given = _tuple(inputs) if self.is_first else ()
        # What torch splits and gives to the loss: the last chunk has its targets already.
        numbers = torch.arange(self._microbatches) if self.is_last else None
        try:
            with self._trial.agreed(self._chunks):
                self._schedule.step(*given, target=numbers)
        except RuntimeError as error:
            # torch's stage raises one of its own about whatever a forward raises.
            if isinstance(error.__cause__, ParallelError):
                raise error.__cause__ from None
            raise
        return self._losses()

    def forget_shapes(self) -> None:
        """Let the next step begin with a trial again: for other shapes, dtypes or frozen layers.

        Collective: every rank of the pipeline calls this, or none.
        """
        self._trial = self._schedule = None

    @torch.no_grad()
    def evaluate(self, inputs: Given | None = None, targets: Given | None = None) -> Tensor | None:
        """Return a batch's losses, as `step`, without gradients: forward only, in any schedule.

        Shapes may differ from those of the steps. The chunks run in the mode that ``module.eval()``
        or ``module.train()`` set, one microbatch after another.

        Collective: as `step`, whose arguments, result and errors it has.
        """
        batches = self._split(inputs, "inputs", self.is_first)
        self._expect(self._split(targets, "targets", self.is_last))
        if self._group is None:
            for batch in batches:
                self._chunks[0](*batch)
        else:
            device = device_of(self._chunks)
            for _ in run_chunks(self._chunks, self._total, batches, self._group, device):
                pass
        return self._losses()

    def _expect(self, targets: list[Tensors]) -> None:
        last = self._chunks.get(self._total - 1)
        if last is not None:
            last.expect(targets)

    def _losses(self) -> Tensor | None:
        last = self._chunks.get(self._total - 1)
        if last is None:
            return None
        losses = torch.stack(last.losses)
        last.expect(())
        return losses

    def _split(self, given: Given | None, what: str, is_needed: bool) -> list[Tensors]:
        """Return the microbatches' parts of a batch; what is not needed is checked all the same.

        So that all ranks raise, where all are given the same.
        """
        if given is None:
            if is_needed:
                raise ParallelError(
                    f"Pipeline: no {what} on a rank that has the "
                    f"{'first' if what == 'inputs' else 'last'} chunk; give them there (other "
                    "ranks may leave them out)"
                )
            return [()] * self._microbatches
        for one in _tuple(given):
            if not isinstance(one, Tensor):
                raise ParallelError(
                    f"Pipeline: {what} are a {type(given).__name__} that holds a "
                    f"{type(one).__name__}; expected a tensor, or a tuple of tensors"
                )
            rows = one.shape[0] if one.dim() else 0
            if not rows or rows % self._microbatches:
                raise DegreeError(
                    f"Pipeline: {what} of shape {tuple(one.shape)} for {self._microbatches} "
                    "microbatches; expected a multiple of that in the first dim (drop_last=True "
                    "leaves out a data loader's last, smaller batch)"
                )
        parts = [one.chunk(self._microbatches) for one in _tuple(given)]
        return list(zip(*parts, strict=True))


def _tuple(given: Given | None) -> Tensors:
    if given is None:
        return ()
    return (given,) if isinstance(given, Tensor) else tuple(given)


def _built(build: Callable[..., nn.Module], layers: range, number: int, total: int) -> nn.Module:
    first, last = number == 0, number == total - 1
    module: object = build(layers=layers, first=first, last=last)
    if not isinstance(module, nn.Module) or isinstance(module, DistributedDataParallel):
        raise ParallelError(
            f"build(layers={layers}, {first=}, {last=}) returned {type(module).__name__}; expected "
            "a plain nn.Module (in place of DistributedDataParallel call "
            "finalize_grads(pipeline.module, average_over=('data',)) after each step)"
        )
    return module


def _known(group: ProcessGroup) -> ProcessGroup:
    """Return a group after checking that torch's schedules can use it."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        raise ParallelError(
            f"torch.distributed does not know the pipeline group of {group.size()} ranks, and its "
            "schedules need it to; make the group with torch.distributed (in tests: "
            "run_ranks(..., in_processes=True))"
        ) from None
    return group
