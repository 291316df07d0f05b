"""What a test has found, whether it is good, and the page that says so."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import ezpz_obs

from .measure import Bandwidth, Pairs


@dataclass
class Result:
    ranks: int
    nodes: int
    device: str
    backend: str
    degrees: dict[str, int]
    wrap: str
    parameters: int
    tokens_per_step: int
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)  # of the median step, where known
    not_finite: str = ""  # what was not, and on how many ranks
    disagreement: str = ""  # in what ranks differ that should not
    bandwidths: list[Bandwidth] = field(default_factory=list)
    pairs: Pairs | None = None

    def failures(self) -> list[str]:
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
        failures = self.failures()
        return {
            "ok": not failures, "failures": failures,
            "ranks": self.ranks, "nodes": self.nodes, "device": self.device,
            "backend": self.backend, "degrees": self.degrees, "wrap": self.wrap,
            "parameters": self.parameters,
            "steps": len(self.losses), "tokens_per_step": self.tokens_per_step,
            "losses": self.losses, "step_s": self.median_seconds(), **self.rates,
            "all_reduce": [one.facts() for one in self.bandwidths],
            "node_pairs": None if self.pairs is None else self.pairs.facts(),
        }  # fmt: skip


def ends(losses: Sequence[float]) -> tuple[float, float]:
    if not losses:
        return math.nan, math.nan
    quarter = max(1, len(losses) // 4)
    return statistics.fmean(losses[:quarter]), statistics.fmean(losses[-quarter:])


def has_fallen(losses: Sequence[float]) -> bool:
    before, after = ends(losses)
    return after < before


_MOST_PAIRS = 10  # of more, only the slowest are listed


def write_page(result: Result, run: Path, out: TextIO, *, pairs_asked: bool) -> None:
    degrees = ", ".join(f"{axis} {degree}" for axis, degree in result.degrees.items() if degree > 1)
    out.write("\n")
    try:
        ezpz_obs.plot(run, "loss", file=out, height=16)
    except ezpz_obs.ReportError as error:
        # Without a curve the numbers still count.
        out.write(f"no loss curve: {error}\n")
    how = f"{result.wrap}, {degrees}" if degrees else result.wrap
    where = f"{_count(result.nodes, 'node')}: {result.device}, {result.backend}"
    lines = [
        "",
        f"model       Llama of {result.parameters / 1e6:.2f} M parameters; {how}",
        f"ranks       {result.ranks} on {where}",
    ]
    if result.losses:
        first, last = result.losses[0], result.losses[-1]
        lines += [
            f"loss        {first:.3f} to {last:.3f} in {len(result.losses)} steps",
            f"step        {_time(result.median_seconds())}, the median",
            f"throughput  {_throughput(result)}",
        ]
    if result.ranks == 1:
        lines.append("all-reduce  one rank: there is no peer to send to")
    elif result.bandwidths:
        lines += ["", *_bandwidth_lines(result.bandwidths, result.ranks)]
    if result.pairs is not None:
        lines += ["", *_pair_lines(result.pairs)]
    elif pairs_asked:
        lines += ["", "pairs       one node: there is no pair"]
    verdict = [f"FAILED: {failure}" for failure in result.failures()] or [
        "ok: the loss fell, all ranks agree, all values are finite"
    ]
    out.write("\n".join([*lines, "", *verdict]) + "\n")
    out.flush()


def _throughput(result: Result) -> str:
    rates = result.rates
    parts = []
    if "tokens_per_s" in rates:
        parts.append(f"{rates['tokens_per_s']:,.0f} tokens/s")
    if "tflops" in rates:
        parts.append(f"{rates['tflops']:.3g} TFLOP/s a rank")
    # The peak is the device's; how to tell it was logged where it is unknown.
    parts.append(f"MFU {rates['mfu']:.1%}" if "mfu" in rates else "MFU unknown")
    return ", ".join(parts)


def _bandwidth_lines(found: list[Bandwidth], ranks: int) -> list[str]:
    rows = (
        f"{_size(one.size):>12}{_time(one.seconds):>12}{_rate(one.algorithm):>14}"
        f"{_rate(one.bus):>14}{one.repeats:>9}"
        for one in found
    )
    heads = f"{'message':>12}{'time':>12}{'algorithm':>14}{'bus':>14}{'repeats':>9}"
    return [f"all-reduce over {ranks} ranks, fp32; 1 GB is 10^9 bytes", heads, *rows]


def _pair_lines(pairs: Pairs) -> list[str]:
    size = next(iter(pairs.found.values())).size
    median = pairs.median()
    by_rate = sorted(pairs.found, key=lambda pair: pairs.found[pair].bus)
    of = f"{_count(len(by_rate), 'pair')} of {len(pairs.hosts)} nodes, messages of {_size(size)}"
    lines = [f"all-reduce within each of {of}; bus bandwidth, slowest first"]
    for pair in by_rate[:_MOST_PAIRS]:
        one = pairs.found[pair]
        names = " and ".join(f"{pairs.hosts[node]} (node {node})" for node in pair)
        lines.append(f"{_rate(one.bus):>14}  {one.bus / median:>4.0%} of the median  {names}")
    if len(by_rate) > _MOST_PAIRS:
        lines.append(f"{'':>14}  and {len(by_rate) - _MOST_PAIRS} more; --json has all of them")
    first, second = pairs.slowest()
    lines.append(f"slowest pair: {pairs.hosts[first]} and {pairs.hosts[second]}")
    if len(pairs.hosts) > 2:
        node = min(range(len(pairs.hosts)), key=pairs.of_node)
        lines.append(
            f"slowest node: {pairs.hosts[node]}, {_rate(pairs.of_node(node))} in the median of its "
            f"pairs; all pairs {_rate(median)}"
        )
    return lines


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number:,} {what}s"


def _size(size: int) -> str:
    units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (0, "B"))
    unit, name = next(each for each in units if size >= each[0])
    return f"{size / (unit or 1):g} {name}"


def _time(seconds: float) -> str:
    unit, name = (1.0, "s") if seconds >= 1 else (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "us")
    return f"{seconds / unit:.3g} {name}"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3f} GB/s"
