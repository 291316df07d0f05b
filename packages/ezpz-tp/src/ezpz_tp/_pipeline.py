"""A model split by its layers over the ranks of a pipeline, and its steps."""

from __future__ import annotations

import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parallel import DistributedDataParallel

from ._current import current_state, index_or_alone, size_or_alone
from ._errors import DegreeError, ParallelError
from ._random import default_states, rng_contexts, set_default_states
from ._state import ParallelState

# One chunk of a pipeline's model, as the schedule runs it.

Tensors = tuple[Tensor, ...]
Given = Tensor | Tensors
"""What a chunk takes and returns: a tensor, or a tuple of them."""


class Chunk(nn.Module):
    """A part of the model, from what it receives to what it sends, or to the loss."""

    # The last chunk returns its share of the mean loss rather than its output: the schedule keeps
    # what a chunk returns until the step is over, and of logits that is the most memory there is.

    def __init__(
        self, module: nn.Module, number: int, total: int, loss: Callable[..., object], count: int
    ) -> None:
        super().__init__()
        self.module = module
        self.is_first = number == 0
        self.is_last = number == total - 1
        self._name = f"chunk {number} of {total}"
        self._loss = loss
        self._microbatches = count
        self._targets: Iterator[Tensors] = iter(())
        self.losses: list[Tensor] = []
        self.agreed: list[str] | None = None
        """What the next chunk's rank waits for in a step; None before the trial."""

    def expect(self, targets: Iterable[Tensors]) -> None:
        self._targets = iter(targets)
        self.losses = []

    def forward(self, *inputs: Tensor) -> Tensors:
        output = self.module(*inputs)
        if not self.is_last:
            outputs = tuple(one.contiguous() for one in self._sendable(output))
            # Without gradients it is an evaluation, in which every message tells its shape.
            agreed = None
            if torch.is_grad_enabled():
                agreed = self.agreed
            if agreed is not None and agreed_facts(outputs) != agreed:
                raise ParallelError(
                    f"{self._name} returned {' and '.join(agreed_facts(outputs))}; expected, as in "
                    f"the first step, {' and '.join(agreed)}, for which the next chunk's rank "
                    "waits: call forget_shapes() on every rank before such a change"
                )
            return outputs
        loss = self._loss(output, *next(self._targets))
        if not (isinstance(loss, Tensor) and loss.dim() == 0):
            shape = ""
            if isinstance(loss, Tensor):
                shape = f"a tensor of shape {tuple(loss.shape)}"
            raise ParallelError(
                f"the pipeline's loss returned {shape or type(loss).__name__}; expected a 0-dim "
                "tensor, the mean over the microbatch that it is given"
            )
        self.losses.append(loss.detach())
        # Not a view of the loss, because torch's stages detach it in place.
        return (torch.stack([loss / self._microbatches]),)

    def _sendable(self, output: object) -> Tensors:
        outputs = tuple(output) if isinstance(output, tuple | list) else (output,)
        for one in outputs:
            if not isinstance(one, Tensor):
                raise ParallelError(
                    f"{self._name} returned {type(one).__name__}; expected a tensor, or a tuple "
                    "of tensors, for the next chunk's forward"
                )
        return outputs


def agreed_facts(tensors: Tensors) -> list[str]:
    """Return what ranks have to agree on of tensors that they exchange."""
    facts = []
    for one in tensors:
        words = f"{tuple(one.shape)} of {one.dtype}"
        if one.requires_grad:
            words += " with a gradient"
        facts.append(words)
    return facts


# Tensors handed from rank to rank along a pipeline, each with its shape.
#
# torch's stages want to know every shape before the first step, or send them as pickled objects,
# which needs numpy. Here a few integers go before the tensors. The methods of the process group
# are called directly, so that any group will do.

_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32),
    *(torch.int16, torch.int8, torch.uint8, torch.bool),
)
_HEADER = 64


def run_chunks(
    chunks: Mapping[int, Chunk], total: int, batches: Sequence[Tensors], group: ProcessGroup
) -> Iterator[tuple[int, Tensors, Tensors]]:
    """Run this rank's chunks forward, microbatch by microbatch; yield what each took and gave."""
    # Collective: every rank of the group, with as many microbatches.
    device = find_device(chunks)
    before = (group.rank() - 1) % group.size()
    after = (group.rank() + 1) % group.size()
    sent: list[tuple[Work, Tensor]] = []
    for batch in batches:
        for number, chunk in chunks.items():
            taken = batch
            if number != 0:
                taken = receive(group, before, device)
            given = chunk(*taken)
            if number < total - 1:
                sent += send(given, group, after, device)
            yield number, taken, given
    for work, _ in sent:
        work.wait()


def send(
    tensors: Tensors, group: ProcessGroup, peer: int, device: torch.device
) -> list[tuple[Work, Tensor]]:
    numbers = [len(tensors)]
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise ParallelError(
                f"a pipeline's chunk returned a tensor of {tensor.dtype}; expected one of "
                f"{', '.join(map(str, _DTYPES))}: convert it before the chunk returns it"
            )
        kind = _DTYPES.index(tensor.dtype)
        numbers += [kind, tensor.requires_grad, tensor.dim(), *tensor.shape]
    if len(numbers) > _HEADER:
        raise ParallelError(
            f"a pipeline's chunk returned {len(tensors)} tensors, whose shapes are {len(numbers)} "
            f"numbers; expected at most {_HEADER}: join some of them"
        )
    header = torch.tensor(numbers + [0] * (_HEADER - len(numbers)), device=device)
    contents = [tensor.detach().contiguous() for tensor in tensors]
    return [(group.send([one], peer, 0), one) for one in (header, *contents)]


def receive(group: ProcessGroup, peer: int, device: torch.device) -> Tensors:
    header = torch.zeros(_HEADER, dtype=torch.int64, device=device)
    group.recv([header], peer, 0).wait()
    numbers = iter(header.tolist())
    tensors = []
    for _ in range(next(numbers)):
        kind, requires_grad, dims = itertools.islice(numbers, 3)
        shape = list(itertools.islice(numbers, dims))
        tensor = torch.empty(shape, dtype=_DTYPES[kind], device=device)
        group.recv([tensor], peer, 0).wait()
        tensors.append(tensor.requires_grad_(bool(requires_grad)))
    return tuple(tensors)


# One microbatch through the pipeline, to learn what every rank will receive and send.


Shapes = dict[int, tuple[Tensors, Tensors]]
"""What each of this rank's chunks takes and gives: tensors without contents, on the meta device."""


def try_out(
    chunks: Mapping[int, Chunk], total: int, batch: Sequence[Tensors], group: ProcessGroup
) -> Shapes:
    """Run one microbatch forward. The model is as before: gradients, buffers, random streams."""
    # Collective: every rank of the group calls this at the same time.
    inputs, targets = batch
    shapes: Shapes = {}
    for chunk in chunks.values():
        chunk.agreed = None
    if total - 1 in chunks:
        chunks[total - 1].expect([targets])
    # With gradients, as the steps will be: what is compiled is compiled for them, and which
    # activations need one is a part of what is asked.
    with _restore_afterwards(chunks.values()), torch.enable_grad():
        for number, taken, given in run_chunks(chunks, total, [inputs], group):
            shapes[number] = _meta_copies(taken), _meta_copies(given)
    for number, chunk in chunks.items():
        chunk.agreed = agreed_facts(shapes[number][1])
    return shapes


def find_device(chunks: Mapping[int, Chunk]) -> torch.device:
    for chunk in chunks.values():
        for tensor in itertools.chain(chunk.parameters(), chunk.buffers()):
            return tensor.device
    return torch.get_default_device()


@contextmanager
def _restore_afterwards(chunks: Iterable[Chunk]) -> Iterator[None]:
    states = default_states(None)
    kept = []
    for chunk in chunks:
        for module in chunk.modules():
            for name, buffer in module.named_buffers(recurse=False):
                before = buffer.detach().clone()
                kept.append((module, name, buffer, before))
    _, tracked = rng_contexts()
    try:
        with tracked:
            yield
    finally:
        set_default_states(states, None)
        with torch.no_grad():
            for module, name, buffer, before in kept:
                setattr(module, name, buffer)  # forward may have put another in its place
                if not torch.equal(buffer, before):  # an expanded one cannot be written to
                    buffer.copy_(before)


def _meta_copies(tensors: Tensors) -> Tensors:
    metas = []
    for one in tensors:
        meta = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
        meta.requires_grad_(one.requires_grad)
        metas.append(meta)
    return tuple(metas)


# torch's pipeline schedules, by the names of `ezpz_tp.Pipeline`.

SCHEDULES = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
}  # fmt: skip


def check_schedule(schedule: str, virtual: int, microbatches: int, ranks: int) -> None:
    if schedule not in SCHEDULES:
        raise DegreeError(f"schedule {schedule!r}; expected one of {', '.join(SCHEDULES)}")
    if (virtual < 2) if schedule == "interleaved" else (virtual != 1):
        expected = "1"
        if schedule == "interleaved":
            expected = "2 or more"
        raise DegreeError(
            f"schedule {schedule!r} with virtual={virtual} chunks a rank; expected {expected} "
            "(several chunks a rank are what interleaved is for)"
        )
    if microbatches < 1:
        raise DegreeError(f"microbatches={microbatches}; expected at least 1")
    if schedule == "1f1b" and microbatches < ranks:
        raise DegreeError(
            f"schedule '1f1b' with {microbatches} microbatches in a pipeline of {ranks} ranks; "
            f"expected at least {ranks}, or schedule='gpipe'"
        )
    rounds = max(1, microbatches // ranks)
    if schedule == "interleaved" and microbatches % rounds:
        raise DegreeError(
            f"schedule 'interleaved' with {microbatches} microbatches in a pipeline of {ranks} "
            f"ranks; expected a multiple of the {rounds} rounds it runs them in: best, of {ranks}"
        )


def torch_schedule(
    kind: str, shapes: Shapes, chunks: Mapping[int, Chunk], total: int, count: int, group: Any
) -> Any:
    """Return torch's schedule over this rank's chunks."""
    from torch.distributed import pipelining  # noqa: PLC0415 - it takes a second

    stages = []
    device = find_device(chunks)
    for number, chunk in chunks.items():
        taken, given = shapes[number]
        stage = pipelining.PipelineStage(chunk, number, total, device, taken, given, group=group)
        stages.append(stage)
    made: Any = getattr(pipelining, SCHEDULES[kind])
    # From torch 2.7 on gradients would be divided by the number of microbatches after the step,
    # those of steps before included. The last chunk divides the loss.
    takes_scale = "scale_grads" in inspect.signature(made).parameters
    options = {}
    if takes_scale:
        options = {"scale_grads": False}
    if kind != "interleaved":
        return made(stages[0], count, loss_fn=_first_output, **options)
    return made(stages, count, loss_fn=_first_output, **options)


def _first_output(output: Sequence[Tensor], _: Tensor) -> Tensor:
    return output[0]


# Which layers each part of a pipeline has: pure arithmetic.


def split_layers(count: int, stages: int) -> tuple[range, ...]:
    """Split the numbers of layers into contiguous ranges, as equal as can be.

    The first ``count % stages`` ranges have one layer more. For an interleaved schedule give
    ranks times chunks a rank as ``stages``: range c is on rank ``c % ranks``.

    Args:
        count: Number of layers.
        stages: Number of ranges, each of at least one layer.

    Raises:
        DegreeError: There are fewer layers than stages, or no stage.

    >>> split_layers(10, 4)
    (range(0, 3), range(3, 6), range(6, 8), range(8, 10))
    """
    if stages < 1:
        raise DegreeError(f"split_layers: {stages} stages; expected at least 1")
    if count < stages:
        raise DegreeError(
            f"split_layers: {count} layers for {stages} stages; expected a layer for each: lower "
            "the pipeline's degree, or the number of chunks a rank (virtual=)"
        )
    each, more = divmod(count, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return tuple(map(range, starts, starts[1:]))


def layer_ranges(layers: int | Sequence[range], chunks: int) -> tuple[range, ...]:
    if isinstance(layers, int):
        return split_layers(layers, chunks)
    ranges = tuple(layers)
    if len(ranges) != chunks:
        raise DegreeError(
            f"layers has {len(ranges)} ranges; expected {chunks}, one for each chunk of the "
            "pipeline (ranks times virtual)"
        )
    start = 0
    for each in ranges:
        if each != range(start, each.stop):
            raise DegreeError(
                f"layers holds {each} where layer {start} is next; expected contiguous ranges "
                "from 0, in the order of the model"
            )
        start = each.stop
    return ranges


# A rank's chunks as one module, with the names of the whole model.


class Chunks(nn.ModuleList):
    """Several parts of one model. Its names, and so its state dict, are a part of the model's."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(modules)
        named: dict[str, object] = {}
        for number, module in enumerate(modules):
            kept = module.state_dict(keep_vars=True)
            for name, value in kept.items():
                if named.setdefault(name, value) is not value:
                    raise ParallelError(
                        f"chunk {number} of this rank has another {name} than a chunk before it; "
                        "expected the names of the whole model: number the layers through, as in "
                        "nn.ModuleDict({str(number): ... for number in layers}), and register "
                        "tables with persistent=False"
                    )

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        if memo is None:
            memo = set()
        if not remove_duplicate or self not in memo:
            memo.add(self)
            yield prefix, self
            for module in self:
                yield from module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False, **given: Any) -> Any:
        destination = given.get("destination")
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()  # type: ignore[attr-defined]  # noqa: SLF001
        for module in self:
            module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        found = [module.load_state_dict(state_dict, False, assign) for module in self]
        missing = list(itertools.chain.from_iterable(one.missing_keys for one in found))
        nowhere = set(state_dict).intersection(*(one.unexpected_keys for one in found))
        unexpected = [name for name in state_dict if name in nowhere]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state dict does not fit this rank's {len(self)} chunks: missing are "
                f"{', '.join(missing) or 'none'}; unexpected are {', '.join(unexpected) or 'none'}"
            )
        return _IncompatibleKeys(missing, unexpected)


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
        if degree == 1:
            self._total = 1
        else:
            self._total = degree * virtual
        ranges = layer_ranges(layers, self._total)
        self._group = None
        if state is not None and degree > 1:
            self._group = state.group("pipeline")
        self._kind = schedule
        self._microbatches = microbatches
        numbers = range(place, self._total, degree)
        modules = [_build_module(build, ranges[number], number, self._total) for number in numbers]
        self._chunks = {
            number: Chunk(module, number, self._total, loss, microbatches)
            for number, module in zip(numbers, modules, strict=True)
        }
        self.module: nn.Module = modules[0] if len(modules) == 1 else Chunks(modules)
        self.layers: tuple[range, ...] = tuple(ranges[number] for number in numbers)
        self.is_first: bool = 0 in numbers
        self.is_last: bool = self._total - 1 in numbers
        self._inputs: list[str] = []
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
        found = agreed_facts(batches[0])
        if self._schedule is None:
            share = (self._chunks, self._total)
            self._inputs = found
            shapes = try_out(*share, (batches[0], expected[0]), self._group)
            made = self._kind, shapes, *share, self._microbatches, self._group
            self._schedule = torch_schedule(*made)
        if found and self._inputs and found != self._inputs:
            raise DegreeError(
                f"Pipeline: a microbatch's inputs are {' and '.join(found)}; expected those of the "
                f"first step, {' and '.join(self._inputs)}: pad them, or call forget_shapes() on "
                "every rank before"
            )
        self._expect(expected)
        given: tuple[Tensor, ...] = ()
        if self.is_first:
            given = _as_tuple(inputs)
        # What torch splits and gives to the loss: the last chunk has its targets already.
        numbers = None
        if self.is_last:
            numbers = torch.arange(self._microbatches)
        try:
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
        self._schedule = None

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
            for _ in run_chunks(self._chunks, self._total, batches, self._group):
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
        """Return the microbatches' parts of a batch; what is not needed is checked all the same."""
        # So that all ranks raise, where all are given the same.
        if given is None:
            if is_needed:
                raise ParallelError(
                    f"Pipeline: no {what} on a rank that has the "
                    f"{'first' if what == 'inputs' else 'last'} chunk; give them there (other "
                    "ranks may leave them out)"
                )
            return [()] * self._microbatches
        for one in _as_tuple(given):
            if not isinstance(one, Tensor):
                raise ParallelError(
                    f"Pipeline: {what} are a {type(given).__name__} that holds a "
                    f"{type(one).__name__}; expected a tensor, or a tuple of tensors"
                )
            rows = 0
            if one.dim():
                rows = one.shape[0]
            if not rows or rows % self._microbatches:
                raise DegreeError(
                    f"Pipeline: {what} of shape {tuple(one.shape)} for {self._microbatches} "
                    "microbatches; expected a multiple of that in the first dim (drop_last=True "
                    "leaves out a data loader's last, smaller batch)"
                )
        parts = [one.chunk(self._microbatches) for one in _as_tuple(given)]
        return list(zip(*parts, strict=True))


def _as_tuple(given: Given | None) -> Tensors:
    if given is None:
        return ()
    if isinstance(given, Tensor):
        return (given,)
    return tuple(given)


def _build_module(
    build: Callable[..., nn.Module], layers: range, number: int, total: int
) -> nn.Module:
    first = number == 0
    last = number == total - 1
    module: object = build(layers=layers, first=first, last=last)
    if not isinstance(module, nn.Module) or isinstance(module, DistributedDataParallel):
        raise ParallelError(
            f"build(layers={layers}, {first=}, {last=}) returned {type(module).__name__}; expected "
            "a plain nn.Module (in place of DistributedDataParallel call "
            "finalize_grads(pipeline.module, average_over=('data',)) after each step)"
        )
    return module
