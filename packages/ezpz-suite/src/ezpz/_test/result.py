"""What a test has found, and whether it is good."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .bandwidth import Bandwidth
from .pairs import Pairs


@dataclass(frozen=True, slots=True)
class Place:
    """Where a test ran.

    Attributes:
        ranks: How many there were.
        nodes: On how many nodes.
        device: A device's name, or its type.
        backend: Of torch.distributed.
        degrees: Degree of each axis: tensor, pipeline, context, data.
        wrap: How the model was wrapped.
        parameters: Of the whole model.
    """

    ranks: int
    nodes: int
    device: str
    backend: str
    degrees: dict[str, int]
    wrap: str
    parameters: int


@dataclass
class Result:
    """What a test has found.

    Attributes:
        place: Where it ran.
        tokens_per_step: Over all ranks.
        losses: Mean over all ranks, by step.
        seconds: Of each step.
        rates: Of the median step: tokens_per_s, tflops and mfu where they are known.
        not_finite: What was not finite in the last step, with the ranks that said so; or empty.
        disagreement: In what ranks differ that should not; or empty.
        bandwidths: By size of the message; none of one rank.
        pairs: Of pairs of nodes; None where there is one node, or nobody asked.
    """

    place: Place
    tokens_per_step: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    not_finite: str = ""
    disagreement: str = ""
    bandwidths: list[Bandwidth] = field(default_factory=list)
    pairs: Pairs | None = None

    def failures(self) -> list[str]:
        """Return what is not as it should be, a line each; none where all is well."""
        found = []
        if self.not_finite:
            found.append(f"step {len(self.losses)}: {self.not_finite}")
        elif not has_fallen(self.losses):
            before, after = ends(self.losses)
            found.append(
                f"the loss did not fall: mean {before:.4f} of the first quarter of "
                f"{len(self.losses)} steps, {after:.4f} of the last"
            )
        if self.disagreement:
            found.append(f"ranks disagree: {self.disagreement}")
        every = [*self.bandwidths, *(self.pairs.found.values() if self.pairs else ())]
        if wrong := sorted({one.size for one in every if not one.is_right}):
            found.append(f"all-reduce gave wrong sums for messages of {wrong} bytes")
        return found

    def median_seconds(self) -> float:
        """Return the median time of a step, those left out in which things are set up."""
        settled = self.seconds[len(self.seconds) // 4 :] or self.seconds
        return statistics.median(settled) if settled else math.nan

    def facts(self) -> dict[str, Any]:
        """Return what is written for programs; the keys are those of docs/command.md."""
        place = self.place
        failures = self.failures()
        return {
            "ok": not failures,
            "failures": failures,
            "ranks": place.ranks, "nodes": place.nodes, "device": place.device,
            "backend": place.backend, "degrees": place.degrees, "wrap": place.wrap,
            "parameters": place.parameters,
            "steps": len(self.losses), "tokens_per_step": self.tokens_per_step,
            "losses": self.losses, "step_s": self.median_seconds(), **self.rates,
            "all_reduce": [one.facts() for one in self.bandwidths],
            "node_pairs": None if self.pairs is None else self.pairs.facts(),
        }  # fmt: skip


def ends(losses: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the first and of the last quarter."""
    if not losses:
        return math.nan, math.nan
    quarter = max(1, len(losses) // 4)
    return statistics.fmean(losses[:quarter]), statistics.fmean(losses[-quarter:])


def has_fallen(losses: Sequence[float]) -> bool:
    """Whether the last quarter's mean is below the first's."""
    before, after = ends(losses)
    return after < before
