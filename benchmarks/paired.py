"""What is measured in turn (A B A B ...), and the row of figures that comes of it.

A machine that changes its speed changes neighbours alike: what is compared are the ratios of
neighbours in time, by their median, with their quartiles beside it.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

Samples = Sequence[float]


class MeasureError(Exception):
    """What was to be measured failed; the message says why, in one line."""


@dataclass(frozen=True)
class Spread:
    """Samples of one figure: median, quartiles, the smallest, and how many there were."""

    median: float
    low: float
    high: float
    least: float
    count: int

    @classmethod
    def of(cls, samples: Samples) -> Self:
        """Summarise samples; of fewer than three the smallest and the largest are the quartiles.

        Raises:
            ValueError: There is none, or one is not a number.
        """
        found = sorted(float(sample) for sample in samples)
        if not found or any(sample != sample for sample in found):  # noqa: PLR0124  # NaN
            raise ValueError(f"samples {list(samples)}: expected at least one, and no NaN")
        low, high = found[0], found[-1]
        if len(found) > 2:
            low, _, high = statistics.quantiles(found, method="inclusive")
        return cls(statistics.median(found), low, high, found[0], len(found))


@dataclass(frozen=True)
class Row:
    """A figure of ours, alone or beside a peer's.

    Attributes:
        key: Its name for goals and comparisons: the section, what, and the peer.
        what: The same for people, without the peer.
        unit: Of both figures: min, s, ms, us, ns, MB; empty of a count.
        ours: What was measured of this project.
        peer: Whom it is compared with, and the version; empty where with nobody.
        theirs: What was measured of the peer.
        ratio: Ours / theirs, of neighbours in time.
        missing: Why there are no figures.
    """

    key: str
    what: str
    unit: str
    ours: Spread | None = None
    peer: str = ""
    theirs: Spread | None = None
    ratio: Spread | None = None
    missing: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Undo `to_json`; what else there is (the verdicts of goals) is left out."""
        spreads = {
            name: Spread(**fields[name]) if fields[name] else None
            for name in ("ours", "theirs", "ratio")
        }
        words = {name: str(fields[name]) for name in ("key", "what", "unit", "peer", "missing")}
        return cls(**words, **spreads)  # type: ignore[arg-type]  # two kinds of values


def alone(key: str, what: str, unit: str, samples: Samples) -> Row:
    """Return the row of a figure that stands for itself."""
    return Row(key, what, unit, Spread.of(samples))


def beside(key: str, what: str, unit: str, pair: tuple[Samples, Samples], peer: str) -> Row:
    """Return the row of two figures, ours first, measured in turn: sample n beside sample n."""
    ours, theirs = pair
    if not all(theirs):
        raise ValueError(f"{key}: {peer} took {min(theirs)} {unit}; expected more, to divide by")
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return Row(key, what, unit, Spread.of(ours), peer, Spread.of(theirs), Spread.of(ratios))


def absent(key: str, what: str, peer: str, reason: str) -> Row:
    """Return the row of what could not be measured here."""
    return Row(key, what, "", peer=peer, missing=reason)


def interleaved(
    ways: Mapping[str, Callable[[], float]],
    runs: int,
    warm: int = 1,
    *,
    failed: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Measure all in turn, so often; every other round goes backwards, so that none is the first.

    Args:
        ways: What measures once and returns the figure.
        runs: Rounds that count.
        warm: Rounds before them that do not.
        failed: Where it is noted why a peer failed, which is left out from then on, with all that
            it gave; None: nobody may fail. Our own (``ours...``) never may.

    Raises:
        MeasureError: One failed that may not.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(warm + runs):
        for name in names[:: -1 if turn % 2 else 1]:
            if name not in taken:
                continue
            try:
                figure = ways[name]()
            except MeasureError as error:
                if failed is None or name.startswith("ours"):
                    raise
                failed[name] = f"it fails: {error}"
                del taken[name]
            else:
                if turn >= warm:
                    taken[name].append(figure)
    return taken


def seconds(work: Callable[[], object]) -> float:
    """Return how long a piece of work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def times(factor: float, samples: Samples) -> list[float]:
    """Return the samples in another unit."""
    return [factor * sample for sample in samples]


def against(
    key: str,
    what: str,
    unit: str,
    samples: Mapping[str, Samples],
    titles: Mapping[str, str],
    *,
    missing: Mapping[str, str] | None = None,
) -> list[Row]:
    """Return a row for each peer of what `interleaved` found.

    Args:
        key: Of the rows, before the peer's name.
        what: For people.
        unit: s, or ms, us or MB after `times`.
        samples: In the unit; our own are named ``ours``.
        titles: What each peer is called in the table: its name with the version.
        missing: Peers that are not here or failed, and why.
    """
    gone = missing or {}
    return [
        *(
            beside(f"{key}/{name}", what, unit, (samples["ours"], samples[name]), title)
            for name, title in titles.items()
            if name not in gone
        ),
        *(absent(f"{key}/{name}", what, titles.get(name, name), why) for name, why in gone.items()),
    ]
