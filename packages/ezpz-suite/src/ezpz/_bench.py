"""The command ``ezpz bench``: how fast each layout of a Llama trains here, beside the last time.

Each layout of each size is a launch of its own, so that one that runs out of memory, fails or
hangs takes nothing with it. Its first rank prints the row, which this command keeps and compares.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NamedTuple, TextIO

from ezpz import _streams
from ezpz._test.command import (
    UsageError,
    dtype_of,
    option,
    page_of,
    parse,
    part_words,
    run_command,
)
from ezpz._version import __version__

_NAME: Final = "ezpz bench"
_HEAD: Final = f"""\
usage: {_NAME} [OPTION...] [LAUNCH OPTION...]

Train a Llama for a few steps in each layout that the ranks of this job, or of
this host, allow. Compare tokens a second, the step's time, MFU and memory.

Every layout does the same work a step. Each run is a launch of its own; one
that fails is a line that says why. A row a run is appended to a file, and
compared with the last one there of the same kind.

options:"""
_TAIL: Final = f"""
layouts:
  ddp                a copy of the model on every rank
  fsdp               weights, gradients, optimizer state sharded over all ranks
  hsdp, hsdp4        the same over a node's ranks, or over 4, and copies of that
  tp, tp4            each layer split over 2 ranks, or 4, and copies of that
  tp+fsdp, tp4+fsdp  each layer split, and the parts sharded

launch options: those of ezpz-launch, such as
  -n N, --ppn N, -N N      ranks in all, on each host; hosts
  --idle-timeout TIME      end a run that hangs, with the stacks of all ranks
  --dry-run                print how a run would be started, and why, and stop

examples:
  {_NAME}                                the smallest, in all layouts
  {_NAME} --sizes=1b --seq=2048          fastest for a billion parameters?
  {_NAME} --layouts=tp2,tp4,tp8 -n 16    how many ranks should share a layer?
  {_NAME} --baseline=last_month.jsonl    is the machine as fast as it was?

exit status: 0; 1 a run failed otherwise than for want of memory, or no layout
of a size fits; 2 wrong usage; else as of ezpz-launch."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.split(",")))


@dataclass(frozen=True)
class Settings:
    """What is to be run; a number that is 0 and an empty text are chosen by the device."""

    sizes: tuple[str, ...] = option(
        ("debug",), "LIST", "debug, 125m, 1b, ...: of ezpz.models.LLAMA_SIZES (debug)", _names
    )
    layouts: tuple[str, ...] = option((), "LIST", "see below (all that are possible)", _names)
    batch: int = option(4, "N", "sequences a step, times the number of ranks (4)")
    seq: int = option(0, "N", "tokens of a sequence (128; on accelerators 1024)")
    dtype: str = option(
        "", "TYPE", "fp32 or bf16, what is computed in (fp32; on accelerators bf16)", dtype_of
    )
    warmup: int = option(3, "N", "steps before those that are measured (3)")
    steps: int = option(10, "N", "steps that are measured (10)")
    out: str = option("", "FILE", "append rows there (bench/rows.jsonl in ezpz's state folder)")
    baseline: str = option("", "FILE", "compare with these rows as well")
    json: bool = option(False, "", "the rows for programs, on standard output")


# Layouts.

_LAYOUTS: Final = ("ddp", "fsdp", "hsdp", "tp", "tp+fsdp")
_LAYOUT: Final = re.compile(r"ddp|fsdp|hsdp(?P<shard>\d*)|tp(?P<tp>\d*)(?P<sharded>\+fsdp)?")


class Layout(NamedTuple):
    """How ranks share a model, as `Trainer` takes it."""

    name: str  # with its degree
    tp: int = 1
    wrap: str = "auto"
    shard_size: int | None = None


def layout_of(name: str, ranks: int, ppn: int) -> Layout:
    """Return a layout by its name; raise UsageError if so many ranks have none like it."""
    if (match := _LAYOUT.fullmatch(name)) is None:
        raise UsageError(f"--layouts={name}; expected some of {', '.join(_LAYOUTS)}, or tp4, hsdp4")
    if match["shard"] is not None:
        fitting = [size for size in range(2, ranks) if ranks % size == 0]
        size = int(match["shard"] or (ppn if ppn in fitting else max(fitting, default=0)))
        if size not in fitting:
            expected = ", ".join(f"hsdp{one}" for one in fitting) or "another layout"
            raise UsageError(f"--layouts={name} on {ranks} ranks; expected {expected}")
        return Layout(f"hsdp{size}", wrap="fsdp2", shard_size=size)
    if match["tp"] is None:
        return Layout(name, wrap="fsdp2" if name == "fsdp" else "auto")
    tp, sharded = int(match["tp"] or 2), match["sharded"] or ""
    if tp < 2 or ranks % tp or (sharded and ranks == tp):
        expected = "a divisor of them above 1" + (", and several such parts" if sharded else "")
        raise UsageError(f"--layouts={name} on {ranks} ranks: degree {tp}; expected {expected}")
    return Layout(f"tp{tp}{sharded}", tp, "fsdp2" if sharded else "auto")


def layouts_of(names: Sequence[str], ranks: int, ppn: int) -> list[str]:
    """Return the layouts that were asked for, or all that are possible."""
    if names:
        return [layout_of(name, ranks, ppn).name for name in names]
    found = []
    for name in _LAYOUTS[: 1 if ranks == 1 else None]:
        try:
            found.append(layout_of(name, ranks, ppn).name)
        except UsageError:
            continue  # not on so many ranks
    return found


# The command: a launch for each run, without torch.


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ezpz bench`` with these words (default: the process's) and return its exit status."""
    return run_command(argv, _NAME, page_of(_HEAD, Settings, _TAIL), _bench)


def _bench(words: Sequence[str]) -> int:
    import ezpz_launch  # noqa: PLC0415  # a page of help does not need it

    ours, others, options = part_words(words, Settings, _NAME)
    settings: Settings = parse(ours, Settings)
    if "dry-run" in options:
        return ezpz_launch.main([*others, "-m", "ezpz._bench", *ours])
    try:
        folder = ezpz_launch.records_folder(os.environ, "bench")
    except ezpz_launch.LaunchError as error:
        raise UsageError(str(error)) from error
    path = os.path.abspath(settings.out or os.path.join(folder, "rows.jsonl"))
    before = {"last": _read(path, must=False)}
    if settings.baseline:
        before["baseline"] = _read(settings.baseline, must=True)
    status, text = _captured([*others, "--dry-run", "--json", "-m", "ezpz._bench"])
    if status:
        return status
    planned = json.loads(text)
    layouts = layouts_of(settings.layouts, planned["nproc"], planned["ppn"])
    runs = [(size, layout) for size in settings.sizes for layout in layouts]
    own = [word for word in ours if word.partition("=")[0] not in ("--sizes", "--layouts")]
    rows: list[dict[str, Any]] = []
    with _appending(path) as kept:
        for at, (size, layout) in enumerate(runs, 1):
            _say(f"{at} of {len(runs)}: {layout}, {size}, {planned['nproc']} ranks")
            which = f"--sizes={size}", f"--layouts={layout}"
            status, text = _captured([*others, "-m", "ezpz._bench", *own, *which])
            if status in (130, 143):  # Ctrl-C, or the job's end
                break
            row = {
                "layout": layout, "size": size,
                "ranks": planned["nproc"], "nodes": len(planned["hosts"]),
                **(_row_in(text) or {"failed": f"ended with status {status}, see above"}),
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }  # fmt: skip
            kept.write(json.dumps(row) + "\n")
            kept.flush()
            rows.append(row | {name: _beside(row, found) for name, found in before.items()})
            _say(f"{layout}, {size}: {_figures(row).lstrip()}")
            status = 0
    fastest = {size: _fastest(rows, size) for size in settings.sizes}
    page = "\n".join(_lines(rows, fastest, path))
    if settings.json:
        page = json.dumps({"rows": rows, "fastest": fastest, "file": path})
    _streams.print_page(page, _NAME)
    failed = [row for row in rows if "failed" in row and not row.get("out_of_memory")]
    return status or int(bool(failed or None in fastest.values()))


def _say(text: str) -> None:
    _streams.complain(text, _NAME)


def _captured(words: Sequence[str]) -> tuple[int, str]:
    """Launch, and return the exit status and what the ranks wrote to standard output."""
    import ezpz_launch  # noqa: PLC0415  # as above

    with tempfile.TemporaryFile() as kept:
        if sys.stdout is not None:
            sys.stdout.flush()
        before = os.dup(1)
        os.dup2(kept.fileno(), 1)
        try:
            status = ezpz_launch.main(words)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
            os.dup2(before, 1)
            os.close(before)
        kept.seek(0)
        return status, kept.read().decode(errors="replace")


_MARK: Final = '{"ezpz": '  # how a row begins


def _row_in(text: str) -> dict[str, Any] | None:
    """Return the first row that a rank printed, wherever in a line."""
    at = text.find(_MARK)
    if at < 0:
        return None
    row: dict[str, Any] = json.JSONDecoder().raw_decode(text, at)[0]
    return row


# Rows that are kept, and compared.

_SAME: Final = (
    "layout", "size", "ranks", "nodes", "machine", "device", "dtype", "batch", "seq",
)  # fmt: skip
"""Rows that are equal in these are of the same configuration."""


def _read(path: str, *, must: bool) -> list[dict[str, Any]]:
    rows = []
    try:
        with open(path, encoding="utf-8") as lines:
            for at, line in enumerate(lines, 1):
                try:
                    rows.append({**json.loads(line)})
                except (ValueError, TypeError) as error:
                    raise UsageError(
                        f"{path}, line {at} is no row ({error}); expected lines of {_NAME}: remove "
                        "it, or name another file"
                    ) from error
    except OSError as error:
        if must or not isinstance(error, FileNotFoundError):
            raise UsageError(f"{path}: {error.strerror}; expected a file of {_NAME}") from error
    return rows


def _appending(path: str) -> TextIO:
    """Open the file of rows, before there is one that could be lost."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror}; expected a file that can be written: give --out=FILE"
        ) from error


def _beside(row: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Compare with the last of these rows that is of the same configuration."""
    for one in reversed(found if "failed" not in row else ()):
        if "failed" not in one and all(one.get(name) == row[name] for name in _SAME):
            ratio = row["tokens_per_s"] / one["tokens_per_s"]
            apart = (
                row["step_ms_low"] > one["step_ms_high"] or one["step_ms_low"] > row["step_ms_high"]
            )
            verdict = "within the noise" if not apart else "faster" if ratio > 1 else "slower"
            return {"time": one["time"], "ratio": ratio, "verdict": verdict}
    return None


def _fastest(rows: Sequence[Mapping[str, Any]], size: str) -> str | None:
    fitting = [row for row in rows if row["size"] == size and "failed" not in row]
    return max(fitting, key=lambda row: row["tokens_per_s"])["layout"] if fitting else None


def _lines(
    rows: Sequence[Mapping[str, Any]], fastest: Mapping[str, str | None], path: str
) -> Iterator[str]:
    for size, of_size in groupby(rows, lambda row: row["size"]):
        layout = fastest[size]
        yield f"{size}: " + (f"the fastest layout that fits is {layout}" if layout else "none fits")
        for row in of_size:
            yield f"  {row['layout']:<9} {_figures(row)}"
            beside = ((name, row[name]) for name in ("last", "baseline") if row.get(name))
            for name, one in beside:
                said = f"{one['ratio']:.2f} x {name} ({one['time']}), {one['verdict']}"
                yield f"  {'':<9} {said}"
    yield f"rows: {path}"


def _figures(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return f"failed: {row['failed']}"
    step = f"{row['step_ms']:.4g} ms a step ({row['step_ms_low']:.4g} to {row['step_ms_high']:.4g})"
    mfu = f", MFU {row['mfu']:.1%}" if "mfu" in row else ""
    return f"{row['tokens_per_s']:>11,.0f} tokens/s, {step}{mfu}, {row['memory_peak_gib']:.2f} GiB"


# A run: what each of its ranks does.


def measure(words: Sequence[str]) -> int:
    """Be a rank of one run, and print its row, or why there is none. Collective."""
    import torch  # noqa: PLC0415  # the command does without, here and below

    import ezpz_tp  # noqa: PLC0415
    from ezpz.models import ModelError  # noqa: PLC0415
    from ezpz_topo import get_rank  # noqa: PLC0415

    try:
        row = _trained(parse(words, Settings))
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        lacks = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        lacks = lacks or "can't allocate memory" in said  # a CPU's
        row = {"failed": f"{type(error).__name__}: {said}", "out_of_memory": lacks}
        print(json.dumps({"ezpz": __version__, **row}), flush=True)
        if isinstance(error, (ModelError, ezpz_tp.DegreeError)):  # sizes do not fit, on any rank
            return 1
        raise
    if get_rank() == 0:
        print(json.dumps({"ezpz": __version__, **row}), flush=True)
    return 0


def _trained(settings: Settings) -> dict[str, Any]:
    """Train for the steps of one run; return its row, on rank 0. Collective."""
    import torch  # noqa: PLC0415

    import ezpz_device  # noqa: PLC0415
    import ezpz_dist  # noqa: PLC0415
    import ezpz_obs  # noqa: PLC0415
    from ezpz._test.command import Settings as Training  # noqa: PLC0415
    from ezpz._test.rank import Trainer  # noqa: PLC0415
    from ezpz.models import Llama, LlamaConfig  # noqa: PLC0415
    from ezpz_topo import get_local_world_size, get_world_size  # noqa: PLC0415

    (size,), (name,), ranks = settings.sizes, settings.layouts, get_world_size()
    layout = layout_of(name, ranks, get_local_world_size())
    ezpz_dist.setup_torch(seed=0, tensor_parallel_size=layout.tp)
    device = torch.device(ezpz_device.get_torch_device())
    seq = settings.seq or (128 if device.type == "cpu" else 1024)
    dtype = settings.dtype or ("fp32" if device.type == "cpu" else "bf16")
    config = LlamaConfig.named(size, max_seq_len=seq)
    # Ranks that share a model have the sequences of all of them.
    batch = settings.batch * layout.tp
    training = Training(tp=layout.tp, wrap=layout.wrap, batch=batch, seq=seq, dtype=dtype)
    trainer = Trainer(training, config, device, layout.shard_size)
    drawn = torch.randint(config.vocab_size, (batch, seq + 1), device=device)
    tokens, targets = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    seconds = []
    for step in range(-settings.warmup, settings.steps):
        if step == 0:
            ezpz_device.reset_peak_memory()
        begun = time.perf_counter()
        loss, _ = trainer.step(tokens, targets)
        ezpz_dist.synchronize()
        seconds.append(time.perf_counter() - begun)
    if not (loss is not None and loss.isfinite()):
        raise ArithmeticError(f"the loss is {loss}; expected a finite number")
    slowest = ezpz_dist.all_reduce(torch.tensor(seconds[settings.warmup :]), "max")
    peak = ezpz_dist.all_reduce(float(ezpz_device.get_memory().peak or 0), "max")
    low, median, high = (1e3 * one for one in statistics.quantiles(slowest.tolist()))
    facts = ezpz_dist.get_dist_info()
    if facts["rank"] > 0:
        return {}
    sequences = settings.batch * ranks
    shape = torch.empty(1, seq, dtype=torch.int64, device="meta")
    flops = ezpz_device.count_flops(Llama(config, device="meta"), shape, shape)
    rates = ezpz_obs.Throughput(
        tokens_per_step=sequences * seq, flops_per_step=sequences * flops, dtype=dtype
    )
    return {
        "layout": layout.name, "size": size, "ranks": ranks, "nodes": facts["num_nodes"],
        "machine": facts["machine"], "device": ezpz_device.get_device_properties()["name"],
        "backend": facts["backend"], "dtype": dtype, "batch": settings.batch, "seq": seq,
        "parameters": config.parameters(), "steps": settings.steps,
        **rates.metrics(median / 1e3), "step_ms": median, "step_ms_low": low, "step_ms_high": high,
        "memory_peak_gib": peak / (1 << 30), "versions": facts["versions"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(measure(sys.argv[1:]))
