"""What each rank of a test does."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import orjson
import torch

import ezpz_dist
import ezpz_obs
import ezpz_tp
from ezpz._streams import abandon
from ezpz.models import LlamaConfig, ModelError
from ezpz_device import (
    DeviceError,
    get_device_properties,
    get_torch_backend,
    get_torch_device,
)
from ezpz_topo import TopoError, get_rank, get_world_size

from .bandwidth import Bandwidth, default_sizes, measure
from .command import complain
from .options import UsageError, take
from .page import write_page
from .pairs import find_nodes, measure_pairs
from .result import Place, Result
from .settings import Settings, parse
from .trainers import make_trainer
from .training import find_disagreement, train

_SMALL: dict[str, int | str] = {"seq": 128, "layers": 4, "dim": 128, "dtype": "fp32"}
_LARGE: dict[str, int | str] = {"seq": 1024, "layers": 12, "dim": 1024, "dtype": "bf16"}
"""What is trained where nothing is said: in seconds, on a CPU and on an accelerator."""


def run(words: Sequence[str]) -> int:
    """Run the test that the words ask for; return the exit status, the same on every rank.

    Collective: every rank calls this, with the same words.
    """
    try:
        ours, others = take(words)
        if others:
            raise UsageError(f"{others[0]!r} is no option of a test; see ezpz test --help")
        settings = parse(ours)
        with _standard_output(settings) as out:
            return _run(settings, out)
    except (UsageError, ezpz_tp.DegreeError, ModelError) as error:
        # Of the words and the number of ranks, so the same everywhere: one says it.
        if get_rank() == 0:
            complain(str(error))
        return 2
    except (TopoError, DeviceError) as error:
        # Of this process, which may not even know its rank.
        complain(str(error))
        return 2


def _run(settings: Settings, out: TextIO) -> int:
    if settings.wrap == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise UsageError(
            "--wrap=deepspeed: DeepSpeed is not installed; pip install 'ezpz-suite[deepspeed]'"
        )
    ezpz_dist.setup_torch(
        framework="deepspeed" if settings.wrap == "deepspeed" else "DDP",
        seed=settings.seed,
        tensor_parallel_size=settings.tp,
        pipeline_parallel_size=settings.pp,
        context_parallel_size=settings.cp,
    )
    # The folder is rank 0's to look at, and for all to know of.
    if trouble := ezpz_dist.broadcast(_trouble(settings.outdir)):
        raise UsageError(trouble)
    device = torch.device(get_torch_device())
    chosen = _SMALL if device.type == "cpu" else _LARGE
    chosen = {**chosen, "dim": _width(int(chosen["dim"]), settings.tp)}
    missing = {name: value for name, value in chosen.items() if not getattr(settings, name)}
    settings = dataclasses.replace(settings, **missing)  # type: ignore[arg-type]  # names are fields
    with _folder(settings) as folder:
        result = _test(settings, device, folder)
        failed = bool(result.failures())
        if get_rank() == 0 and not _tell(result, settings, folder, out):
            failed = True
    ezpz_dist.cleanup()
    return int(failed)


def _trouble(outdir: str) -> str:
    """Make the folder of rank 0's run; return why it cannot be, or nothing."""
    if not outdir or get_rank() != 0:
        return ""
    try:
        os.makedirs(outdir, exist_ok=True)
    except OSError as error:
        return f"--outdir={outdir}: {error.strerror}; expected a folder that can be made"
    if not os.access(outdir, os.W_OK | os.X_OK):
        return f"--outdir={outdir}: no permission to write there; expected another folder"
    if os.path.exists(os.path.join(outdir, "metrics.jsonl")):
        return f"--outdir={outdir} has a run already; expected a new folder"
    return ""


def _test(settings: Settings, device: torch.device, folder: Path | None) -> Result:
    """Train, compare the ranks, and measure. Collective; all ranks return the same verdict."""
    config = _config(settings)
    trainer = make_trainer(settings, config, device=device)
    nodes = find_nodes()
    state = ezpz_tp.get_state()
    degrees = {axis: state.size(axis) for axis in ("tensor", "pipeline", "context", "data")}
    place = Place(
        ranks=get_world_size(), nodes=len(nodes), device=_name_of(device),
        backend=get_torch_backend(), degrees=degrees, wrap=trainer.wrap,
        parameters=config.parameters(),
    )  # fmt: skip
    result = Result(place, tokens_per_step=settings.batch * settings.seq * degrees["data"])
    log = ezpz_obs.get_logger("test")
    _say(log, "training", ranks=place.ranks, wrap=place.wrap, **degrees)
    train(settings, trainer, config, result, folder)
    result.disagreement = find_disagreement(trainer)
    if place.ranks > 1:
        sizes = default_sizes(device.type) if settings.sizes is None else settings.sizes

        def say(one: Bandwidth) -> None:
            _say(log, "all-reduce", bytes=one.size, seconds=float(f"{one.seconds:.3g}"))

        result.bandwidths = measure(sizes, device, say)
        if settings.pairs:
            largest = max(sizes, default=default_sizes(device.type)[-1])

            def say_round(done: int, of: int) -> None:
                _say(log, f"pairs of nodes: round {done} of {of}")

            result.pairs = measure_pairs(nodes, largest, device, say_round)
    return result


def _config(settings: Settings) -> LlamaConfig:
    heads, unit = _heads(settings.dim, settings.tp), math.lcm(256, settings.tp)
    return LlamaConfig(
        vocab_size=256, dim=settings.dim, layers=settings.layers, heads=heads, kv_heads=heads // 2,
        hidden=-(-8 * settings.dim // (3 * unit)) * unit, max_seq_len=settings.seq,
    )  # fmt: skip


def _heads(dim: int, tp: int) -> int:
    """Return how many query heads there are: of keys and values half as many, which tp divides."""
    return 2 * tp * -(-max(8, dim // 256) // tp)


def _width(dim: int, tp: int) -> int:
    """Return the width from ``dim`` on that its heads divide: 12 tiles of a node want another."""
    unit = 2 * _heads(dim, tp)
    return -(-dim // unit) * unit


def _name_of(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"{get_device_properties()['name']} ({device.type})"


def _say(log: object, event: str, **values: object) -> None:
    if get_rank() == 0:
        log.info(event, **values)  # type: ignore[attr-defined]  # structlog's logger has no type


def _tell(result: Result, settings: Settings, folder: Path | None, out: TextIO) -> bool:
    """Write what was found, on rank 0; return whether it could be written."""
    assert folder is not None  # rank 0 has one
    facts = orjson.dumps(result.facts(), option=orjson.OPT_INDENT_2).decode() + "\n"
    # First: nobody may be left to read the page.
    if settings.outdir:
        (folder / "result.json").write_text(facts)
        complain(f"kept: {folder}/metrics.jsonl and result.json")
    for failure in result.failures() if settings.json else ():
        complain(failure)
    try:
        if settings.json:
            out.write(facts)
            out.flush()
        else:
            write_page(result, folder, out, pairs_asked=settings.pairs)
    except OSError as error:
        abandon(out)
        if not isinstance(error, BrokenPipeError):
            complain(f"standard output: {error.strerror}")
            return False
    return True


@contextlib.contextmanager
def _folder(settings: Settings) -> Iterator[Path | None]:
    """Give rank 0 a folder for the run, which is kept only where the user named it."""
    if get_rank() != 0:
        yield None
    elif settings.outdir:
        yield Path(settings.outdir).absolute()
    else:
        with tempfile.TemporaryDirectory(prefix="ezpz-test-") as made:
            folder = Path(made) / "test"
            yield folder


@contextlib.contextmanager
def _standard_output(settings: Settings) -> Iterator[TextIO]:
    """Keep standard output for JSON, if that is asked for: what libraries print goes elsewhere."""
    if sys.stdout is None:  # closed: nobody wants it
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            yield nowhere
        return
    if not settings.json:
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(kept, "w", encoding="utf-8", closefd=False) as out:
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
