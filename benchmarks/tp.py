"""What tensor parallelism costs: ``hatch run bench:tp [--quick] [--json=FILE]``.

An MLP and a Llama block, forward and backward, in fp32 on one thread: unsharded, this rank's
shard without communication, ezpz_tp, plain Megatron style, functional collectives and DTensor.
Variants are run in turn (A B C A B C ...); times are medians, ratios medians over the rounds.
In a fake world collectives do nothing, which leaves the software's cost; there CPU time counts,
so that a busy machine does not. Over gloo and NCCL ranks are real and the clock counts.
"""

import json as json_module
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import fire
import torch
import torch.distributed as dist

LAYOUTS = {
    64: {"tensor": 4, "context": 2, "pipeline": 2},
    1024: {"tensor": 8, "context": 2, "pipeline": 4},
    12_288: {"tensor": 8, "context": 2, "pipeline": 8},
    120_960: {"tensor": 12, "context": 2, "pipeline": 8},
}
WAYS = {"ezpz": "ezpz_tp", "all": "all groups", "mesh": "DeviceMesh"}
COLUMNS = ("unsharded", "shard", "ezpz", "plain", "functional", "dtensor")


def ranks(script: str, job: dict[str, Any], processes: int = 1) -> Any:
    """Run one world in processes of its own and return what its rank 0 found."""
    path = str(Path(__file__).with_name(script))
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if sys.platform == "darwin":
        env["GLOO_SOCKET_IFNAME"] = "lo0"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    jobs = [job | {"rank": rank, "port": store.port} for rank in range(processes)]
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", path, json_module.dumps(each)],
            env=env, stdout=subprocess.PIPE, text=True,
        )
        for each in jobs
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=900)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise SystemExit(f"{script} {json_module.dumps(job)} failed; see above")
    return json_module.loads(outputs[0])


def worlds(degrees: list[int]) -> list[tuple[str, int, int]]:
    """Each kind of world to measure, with its degree and its number of processes."""
    chosen = [("fake", degree, 1) for degree in degrees] + [("gloo", 2, 2)]
    if torch.cuda.is_available():
        chosen.append(("fake cuda", 2, 1))
        devices = 1 << min(torch.cuda.device_count(), 8).bit_length() - 1
        if devices > 1:
            chosen.append(("nccl", devices, devices))
    return chosen


def show_blocks(rows: list[dict[str, Any]]) -> None:
    """Print a line for each block: microseconds, ratios, and what is saved for backward."""
    print(
        "\nforward + backward, us" + " " * 12 + "".join(f"{name:>11}" for name in COLUMNS), end=""
    )
    print("  | ezpz over: unsharded   shard   plain | dtensor over ezpz")
    for row in rows:
        times = (row["variants"].get(column, {}).get("total_us") for column in COLUMNS)
        cells = "".join(f"{'-' if time is None else f'{time:,.0f}':>11}" for time in times)
        ratio = row["ratios"]
        print(
            f"{title(row):<34}{cells}  |{ratio['ezpz/unsharded']:21.2f}{ratio['ezpz/shard']:8.2f}"
            f"{ratio['ezpz/plain']:8.2f} |{ratio['dtensor/ezpz']:18.1f}"
        )
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


def fake_groups(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Make the groups of rank 0 of fake worlds, in each of the ways."""
    layouts = [(size, LAYOUTS[size]) for size in sizes]
    job = {"world": "fake", "layouts": layouts, "rounds": rounds}
    rows: list[dict[str, Any]] = ranks("tp_groups.py", job)
    for row in rows:
        row["ms"] = round(statistics.median(row["ms"]), 3)
        row["mib"] = round(row["mib"], 3)
    return rows


def gloo_groups(rounds: int) -> dict[str, dict[str, Any]]:
    """Make the groups of 8 real ranks, in turn with all groups, for two layouts."""
    found: dict[str, dict[str, Any]] = {}
    for name, pipeline in (("TP 2 x DP 4", 1), ("TP 2 x PP 2 x DP 2", 2)):
        job: dict[str, Any] = {"world": "gloo", "degree": 8, "rounds": rounds}
        job["degrees"] = {"tensor": 2, "context": 1, "pipeline": pipeline}
        taken = ranks("tp_groups.py", job)
        pairs = [a / b for a, b in zip(taken["ezpz"], taken["all"], strict=True)]
        medians = {f"{way}, ms": round(statistics.median(taken[way]), 2) for way in taken}
        low, ratio, high = (round(value, 3) for value in statistics.quantiles(pairs))
        found[name] = medians | {"ratio": ratio, "quartiles": (low, high)}
    return found


def promises(
    rows: list[dict[str, Any]],
    groups: list[dict[str, Any]],
    real: dict[str, dict[str, Any]],
) -> list[dict[str, Any]]:
    """What was wanted, of what was measured: its name, the figure, its quartiles, the limit."""
    found: list[dict[str, Any]] = []

    def want(name: str, figure: float, limit: str, quartiles: Any = None) -> None:
        found.append({"name": name, "figure": figure, "limit": limit, "quartiles": quartiles})

    for row in rows:
        if row["block"] != "mlp" or row["degree"] != 2:
            continue
        kinds = [
            ("gloo", row["hidden"], "over plain", "ezpz/plain", "<= 1.00"),
            ("fake", 64, "over unsharded", "ezpz/unsharded", "<= 1.20"),
            ("fake", 64, "over plain", "ezpz/plain", "<= 0.95"),
            ("fake", 64, "DTensor over ezpz", "dtensor/ezpz", ">= 6"),
            ("fake", 1024, "over the shard's arithmetic", "ezpz/shard", "<= 1.05"),
        ]
        for world, hidden, name, ratio, limit in kinds:
            if (row["world"], row["hidden"]) == (world, hidden):
                title = f"{world} MLP H {hidden}: {name}"
                want(title, row["ratios"][ratio], limit, row["quartiles"][ratio])
    for row in groups:
        if (row["ranks"], row["way"]) == (120_960, "ezpz"):
            want("groups of 120,960 ranks: ms", row["ms"], "<= 5")
            want("groups of 120,960 ranks: MiB", row["mib"], "<= 1")
            want("groups of 120,960 ranks: calls", row["calls"], "<= 4")
    for layout, figures in real.items():
        title = f"groups of 8 gloo ranks, {layout}"
        want(title, figures["ratio"], "<= 0.70", figures["quartiles"])
    return found


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
    rows: list[dict[str, Any]] = []
    for world, degree, processes in worlds(tensor_degrees):
        rows += ranks("tp_blocks.py", job | {"world": world, "degree": degree}, processes)
    show_blocks(rows)
    sizes = [64, 120_960] if quick else list(LAYOUTS)
    groups = fake_groups(sizes, 1 if quick else 3)
    print("\nmaking a rank's groups       CPU ms     calls    peak MiB")
    for row in groups:
        print(
            f"{row['ranks']:>8,} {WAYS[row['way']]:<12}{row['ms']:>14.3f}{row['calls']:>10,}"
            f"{row['mib']:>12.3f}"
        )
    real = gloo_groups(5 if quick else 11)
    for layout, figures in real.items():
        said = "; ".join(f"{name} {value}" for name, value in figures.items())
        print(f"8 gloo ranks, {layout}: {said}")
    print("\nwanted" + " " * 44 + "median   limit" + " " * 13 + "quartiles")
    wanted = promises(rows, groups, real)
    for line in wanted:
        figure, limit = line["figure"], line["limit"]
        kept = figure <= float(limit[3:]) if limit[0] == "<" else figure >= float(limit[3:])
        low, high = line["quartiles"] or (None, None)
        spread = "" if low is None else f"{low:.3f} to {high:.3f}"
        missed = "" if kept else "MISSED"
        print(f"  {line['name']:<44}{figure:>10.3f}   {limit:<9}{missed:<7}{spread}".rstrip())
    if json:
        everything = {"blocks": rows, "groups": groups, "gloo groups": real, "wanted": wanted}
        Path(json).write_text(json_module.dumps(everything, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    fire.Fire(main)
