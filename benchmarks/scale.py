"""What a job of 120,960 ranks on 10,080 nodes asks of this code: ``hatch run bench:scale``.

Nothing here is such a job. What one process does for itself is measured in its real size; what
many do together is measured as far as this machine goes and then modelled, and is said to be.
docs/scale.md tells how, and how to read it.
"""

import json as json_module
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import fire
from scaling.discovery import detection, planning
from scaling.files import files
from scaling.groups import groups
from scaling.growth import Found
from scaling.metrics import metrics
from scaling.rendezvous import rendezvous
from scaling.report import document, lines, plot, summary
from scaling.start import shim

SECTIONS = ("detection", "planning", "groups", "start", "rendezvous", "metrics")


def main(
    *,
    runs: int = 3,
    only: str = "",
    metadata_rate: float = 50_000,
    read_rate: float = 500,
    name_lookup: float = 0.1,
    json: str = "",
    plots: str = "",
) -> None:
    """Print the figures with the exponents that fit them; the status is 1 if a goal is missed.

    Examples:
        hatch run bench:scale
        hatch run bench:scale --only=detection,groups --runs=5
        hatch run bench:scale --json=scale.json --plots=docs/assets

    Args:
        runs: Samples of each size.
        only: Sections, with commas between; default all of them.
        metadata_rate: Look-ups and opens a second of the shared file system: an assumption.
        read_rate: GB a second that all nodes together read from it: an assumption.
        name_lookup: Milliseconds in which the name service tells the name of an address: an
            assumption.
        json: A file to write the figures to.
        plots: A folder for the plots, as SVG.
    """
    wanted = [*(only if isinstance(only, (list, tuple)) else only.split(","))] if only else SECTIONS
    if unknown := set(wanted) - set(SECTIONS):
        sys.exit(f"--only={','.join(sorted(unknown))}: expected some of {', '.join(SECTIONS)}")
    work: dict[str, Callable[[], Iterable[Found]]] = {
        "detection": lambda: detection(runs),
        "planning": lambda: planning(runs),
        "groups": lambda: groups(runs),
        "start": lambda: [*shim(runs), *files(metadata_rate, read_rate)],
        "rendezvous": lambda: rendezvous(runs, name_lookup),
        "metrics": metrics,
    }
    found: list[Found] = []
    for section in wanted:
        print(f"measuring {section} ...", file=sys.stderr)
        found += work[section]()
    # A section in one piece, in the order in which it was first found.
    order = list(dict.fromkeys(each.section for each in found))
    found.sort(key=lambda each: order.index(each.section))
    colour = bool(os.environ.get("FORCE_COLOR")) or (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
    for line in (*lines(found, colour), *summary(found, colour)):
        print(line)
    if json:
        kept = document(found, time=time.strftime("%Y-%m-%d", time.gmtime()), cores=os.cpu_count())
        Path(json).write_text(json_module.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if plots:
        for path in plot(found, Path(plots)):
            print(f"wrote {path}", file=sys.stderr)
    if any(getattr(each, "verdict", "") == "MISSED" for each in found):
        sys.exit(1)


if __name__ == "__main__":
    fire.Fire(main)
