"""Long sequences: ``hatch run bench:tp-context [--runs=3] [--json=FILE]``.

A Llama's step of training on one rank, and on 8 ranks that share sequences 8 times as long: what
it adds to the memory of the largest rank's process, in worlds in turn.
"""

from functools import partial

import fire
from paired import Row, beside, interleaved
from ranks import ranks
from table import finish


def measure(runs: int) -> list[Row]:
    """Return the rows of ring attention and of Ulysses."""
    rows = []
    for attention in ("ring", "ulysses"):
        job = {"attention": attention}
        ways = {
            "ours": partial(ranks, "tp_context_ranks.py", job, 8),
            "theirs": partial(ranks, "tp_context_ranks.py", job, 1),
        }
        samples = interleaved(ways, runs, warm=0)
        what = f"a sequence on 8 ranks, {attention}: memory"
        key, peer = f"tp_context/memory/{attention}", "one rank, 1/8 of it"
        rows.append(beside(key, what, "MB", (samples["ours"], samples["theirs"]), peer))
    return rows


def main(runs: int = 3, json: str = "") -> None:
    """Print the figures, and write them to a file if one is named.

    Args:
        runs: Worlds of each kind.
        json: A file to write the figures to.
    """
    finish(measure(runs), json)


if __name__ == "__main__":
    fire.Fire(main)
