"""What tensor parallelism costs: ``hatch run bench:tp [--quick] [--json=FILE]``.

An MLP and a Llama block, forward and backward, in fp32 on one thread: unsharded, this rank's
shard without communication, ezpz_tp, plain Megatron style, functional collectives and DTensor.
Variants are run in turn (A B C C B A ...); times are medians, ratios medians over the rounds.
In a fake world collectives do nothing, which leaves the software's cost; there CPU time counts,
so that a busy machine does not. Over gloo and NCCL ranks are real and the clock counts.
"""

from typing import Any

import fire
import torch
from paired import Row, beside, times
from ranks import ranks
from table import finish

LAYOUTS = {
    64: {"tensor": 4, "context": 2, "pipeline": 2},
    1024: {"tensor": 8, "context": 2, "pipeline": 4},
    12_288: {"tensor": 8, "context": 2, "pipeline": 8},
    120_960: {"tensor": 12, "context": 2, "pipeline": 8},
}
COLUMNS = ("unsharded", "shard", "ezpz", "plain", "functional", "dtensor")


def worlds(degrees: list[int], quick: bool) -> list[tuple[str, int, int]]:
    """Each kind of world to measure, with its degree and its number of processes."""
    chosen = [("fake", degree, 1) for degree in degrees] + [("gloo", 2, 2)]
    # In bench:all these are the accelerator's section.
    if torch.cuda.is_available() and not quick:
        chosen.append(("fake cuda", 2, 1))
        devices = 1 << min(torch.cuda.device_count(), 8).bit_length() - 1
        if devices > 1:
            chosen.append(("nccl", devices, devices))
    return chosen


def show_blocks(rows: list[dict[str, Any]]) -> None:
    """Print a line for each block: microseconds, ratios, and what is saved for backward."""
    print("\nforward + backward, us" + " " * 12 + "".join(f"{name:>11}" for name in COLUMNS))
    for row in rows:
        times = (row["variants"].get(column, {}).get("total_us") for column in COLUMNS)
        cells = "".join(f"{'-' if time is None else f'{time:,.0f}':>11}" for time in times)
        print(f"{title(row):<34}{cells}")
    print("\nforward + backward, us; saved for backward besides weights and input, KiB")
    print(" " * 34 + "".join(f"{name:>28}" for name in COLUMNS))
    for row in rows:
        cells = ""
        for column in COLUMNS:
            variant, cell = row["variants"].get(column), "-"
            if variant is not None:
                times = f"{variant['forward_us']:,.0f} + {variant['backward_us']:,.0f}"
                cell = f"{times}; {variant['saved_bytes'] / 1024:,.0f}"
            cells += f"{cell:>28}"
        print(f"{title(row):<34}{cells}")


def title(row: dict[str, Any]) -> str:
    """The name of a line."""
    return f"{row['world']} {row['block']} H {row['hidden']} TP {row['degree']}"


PEERS = {
    "unsharded": "unsharded", "shard": "the shard's products", "plain": "plain Megatron style",
    "functional": "functional", "dtensor": "DTensor",
}  # fmt: skip


def rows_of_blocks(blocks: list[dict[str, Any]], section: str = "tp") -> list[Row]:
    """Return the rows of every block beside every other way to write it."""
    found = []
    for row in blocks:
        name = f"{row['world'].replace(' ', '-')}-{row['block']}-{row['hidden']}"
        name += "" if row["degree"] == 2 else f"-tp{row['degree']}"
        name += "-bias" if row["bias"] else ""
        totals = {way: times(1e6, samples) for way, samples in row["totals"].items()}
        for way, peer in PEERS.items():
            if way in totals:
                what = f"{row['block']} H {row['hidden']}, TP {row['degree']}, {row['world']}"
                key = f"{section}/{name}/{way}"
                found.append(beside(key, what, "us", (totals["ezpz"], totals[way]), peer))
    return found


GROUP_WAYS = {"all": "all-groups", "mesh": "init_device_mesh"}


def fake_groups(sizes: list[int], rounds: int) -> list[Row]:
    """Make the groups of rank 0 of fake worlds, in each of the ways."""
    layouts = [(size, LAYOUTS[size]) for size in sizes]
    job = {"world": "fake", "layouts": layouts, "rounds": rounds}
    found: dict[tuple[int, str], Any] = {
        (row["ranks"], row["way"]): row for row in ranks("tp_groups.py", job)
    }
    rows = []
    for size in sizes:
        for way, peer in GROUP_WAYS.items():
            ours, theirs = found[size, "ezpz"], found[size, way]
            name, what = f"groups-{size}", f"groups, {size:,} ranks"
            figures = (
                ("", ": CPU time", "ms", ours["ms"], theirs["ms"]),
                (
                    "-memory",
                    ": memory",
                    "MB",
                    [ours["mib"] * 2**20 / 1e6],
                    [theirs["mib"] * 2**20 / 1e6],
                ),
                ("-calls", ": creations", "", [ours["calls"]], [theirs["calls"]]),
            )
            rows += [
                beside(f"tp/{name}{end}/{peer}", what + said, unit, (one, other), peer)
                for end, said, unit, one, other in figures
            ]
    return sorted(rows, key=lambda row: row.what)


def gloo_groups(rounds: int) -> list[Row]:
    """Make the groups of 8 real ranks, in turn, for two layouts."""
    rows = []
    for name, pipeline in (("TP 2 x DP 4", 1), ("TP 2 x PP 2 x DP 2", 2)):
        job: dict[str, Any] = {"world": "gloo", "degree": 8, "rounds": rounds}
        job["degrees"] = {"tensor": 2, "context": 1, "pipeline": pipeline}
        # One process forks the others.
        taken = ranks("tp_groups.py", job)
        key = "tp/groups-" + name.lower().replace(" x ", "-").replace(" ", "")
        what = f"groups of 8 gloo ranks, {name}"
        rows += [
            beside(f"{key}/{peer}", what, "ms", (taken["ezpz"], taken[way]), peer)
            for way, peer in GROUP_WAYS.items()
        ]
    return rows


def numbers(name: str, given: Any) -> list[int]:
    """A number or several, as fire gives them."""
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    if not several or any(type(one) is not int or one < 1 for one in several):
        raise SystemExit(f"--{name}={given}: expected whole numbers above 0, with commas between")
    return several


def chosen_blocks(given: Any, hidden: list[int], degrees: list[int]) -> list[str]:
    """The names of the blocks, once they can be made in these sizes."""
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    if not several or any(one not in ("mlp", "llama") for one in several):
        raise SystemExit(f"--blocks={given}: expected mlp, llama or mlp,llama")
    # A Llama block has 8 heads, each of an even width.
    if "llama" in several and any(one % 16 for one in hidden):
        raise SystemExit(f"--hidden={hidden}: expected multiples of 16 for the llama block")
    for degree in degrees:
        if any(4 * one % degree for one in hidden) or ("llama" in several and 8 % degree):
            raise SystemExit(
                f"--degrees={degrees}: {degree} does not divide llama's 8 heads or 4 x {hidden}; "
                "expected e.g. 2, 4 or 8"
            )
    return several


def main(
    *,
    hidden: Any = None,
    degrees: Any = None,
    blocks: Any = ("mlp", "llama"),
    seconds: float = 1.0,
    bias: bool = False,
    quick: bool = False,
    json: str = "",
) -> None:
    """Print the figures, and write them to a file if one is named.

    Examples:
        hatch run bench:tp --quick
        hatch run bench:tp --hidden=64,256 --degrees=2 --blocks=mlp --seconds=5
        hatch run bench:tp --json=tp.json

    Args:
        hidden: Hidden sizes; default 64, 256, 1024, 4096.
        degrees: Tensor-parallel degrees of the fake worlds; default 2, 4, 8.
        blocks: Of mlp and llama.
        seconds: How long the rounds of one block at one size take, about.
        bias: Give the linear layers biases.
        quick: By default hidden 64 and 1024, TP 2; two sizes of groups; about a minute.
        json: A file to write the figures to.
    """
    if hidden is None:
        hidden = (64, 1024) if quick else (64, 256, 1024, 4096)
    if degrees is None:
        degrees = (2,) if quick else (2, 4, 8)
    seconds = min(seconds, 0.5) if quick else seconds
    widths, tensor_degrees = numbers("hidden", hidden), numbers("degrees", degrees)
    job: dict[str, Any] = {"hidden": widths, "seconds": seconds, "bias": bias}
    job["blocks"] = chosen_blocks(blocks, widths, tensor_degrees)
    blocks_found: list[dict[str, Any]] = []
    for world, degree, processes in worlds(tensor_degrees, quick):
        blocks_found += ranks("tp_blocks.py", job | {"world": world, "degree": degree}, processes)
    show_blocks(blocks_found)
    sizes = [64, 120_960] if quick else list(LAYOUTS)
    groups = fake_groups(sizes, 3)
    finish([*rows_of_blocks(blocks_found), *groups, *gloo_groups(9 if quick else 21)], json)


if __name__ == "__main__":
    fire.Fire(main)
