"""torch's pipeline schedules, by the names of `ezpz_tp.Pipeline`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from ezpz_tp._errors import DegreeError

from .chunk import Chunk, Tensors
from .trial import Trial

SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
}


def check_schedule(schedule: str, virtual: int, microbatches: int, ranks: int) -> None:
    """Compare a schedule with what it is to run.

    Raises:
        DegreeError: It is unknown, or does not go with so many chunks a rank or microbatches.
    """
    if schedule not in SCHEDULES:
        raise DegreeError(f"schedule {schedule!r}; expected one of {', '.join(SCHEDULES)}")
    if (virtual < 2) if schedule == "interleaved" else (virtual != 1):
        expected = "2 or more" if schedule == "interleaved" else "1"
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
    kind: str,
    trial: Trial,
    chunks: Mapping[int, Chunk],
    total: int,
    microbatches: int,
    group: ProcessGroup,
) -> Any:
    """Return torch's schedule over this rank's chunks, which knows their shapes from a trial."""
    # Imported here because it takes a second.
    from torch.distributed import pipelining  # noqa: PLC0415

    stages = []
    for number, chunk in chunks.items():
        taken, given = trial.shapes[number]
        stages.append(
            pipelining.PipelineStage(
                chunk,
                number,
                total,
                trial.device,
                input_args=taken,
                output_args=given,
                group=group,
            )
        )
    made: Any = getattr(pipelining, SCHEDULES[kind])
    # From torch 2.7 on gradients would be divided by the number of microbatches after the step,
    # those of steps before included. The last chunk divides the loss.
    takes_scale = "scale_grads" in inspect.signature(made).parameters
    options = {"scale_grads": False} if takes_scale else {}
    what = stages if kind == "interleaved" else stages[0]
    return made(what, microbatches, loss_fn=_loss_of, **options)


def _loss_of(output: Tensors, _: Tensor) -> Tensor:
    """Return what the last chunk returned: it is the loss."""
    (loss,) = output
    return loss
