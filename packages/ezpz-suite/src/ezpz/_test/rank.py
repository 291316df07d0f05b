"""What each rank of a test does: text, model, training, measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TextIO

import orjson
import torch
from torch import Tensor, nn

import ezpz_dist
import ezpz_obs
import ezpz_tp
from ezpz._streams import abandon
from ezpz.data import python_sources
from ezpz.models import Llama, LlamaConfig, ModelError, llama_pipeline
from ezpz_device import DeviceError, get_device_properties, get_torch_backend, get_torch_device
from ezpz_topo import TopoError, get_rank, get_world_size

from .command import Settings, UsageError, complain, parse, take
from .measure import default_sizes, find_nodes, measure, measure_pairs
from .result import Place, Result, write_page

_BYTES = 2 << 20
"""So much is read, by one rank, and sent to the others."""


def load_text() -> Tensor:
    """Return text, uint8 ``[bytes]``, the same on every rank. Collective: every rank calls this."""
    text = None
    if torch.distributed.get_rank() == 0:
        sources = b"".join(path.read_bytes() for path in python_sources(most=_BYTES))
        text = torch.frombuffer(bytearray(sources), dtype=torch.uint8)
    found = ezpz_dist.broadcast(text, root=0)
    assert found is not None  # rank 0 has some
    return found.cpu()


def batch(text: Tensor, step: int, *, seed: int, sequences: int, length: int) -> Tensor:
    """Return the tokens of a step, int64 ``[sequences, length + 1]``, on the host."""
    # Those that split one model get the same.
    replica = ezpz_tp.get_data_parallel_rank()
    # Any two steps of any two replicas draw by themselves.
    drawn = hashlib.blake2b(f"{seed} {step} {replica}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(drawn, "little"))
    starts = torch.randint(len(text) - length, (sequences, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()


_LARGEST_NORM = 1.0
"""Gradients are clipped to it."""


class Trainer(Protocol):
    """A model in training: what this rank holds of it, and how it is wrapped."""

    model: nn.Module
    wrap: str

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        """Train on ``[batch, s]``; return the loss where this rank knows it, and the norm."""
        ...


def make_trainer(settings: Settings, config: LlamaConfig, *, device: torch.device) -> Trainer:
    """Return the trainer that the settings, with a dtype, ask for. Collective."""
    wrap = settings.wrap
    if wrap == "auto":
        replicas = ezpz_tp.get_state().size("data") * settings.cp
        wrap = "ddp" if replicas > 1 and settings.pp == 1 else "none"
    if settings.pp > 1:
        return _Pipelined(settings, config, device, wrap)
    model = Llama(config, parallel=settings.tp * settings.cp > 1, seed=settings.seed)
    if wrap == "deepspeed":
        return _DeepSpeed(settings, model)
    return _Whole(settings, model, device, wrap)


def _learning_rate(config: LlamaConfig) -> float:
    """Return the step width, smaller for wider models (3e-3 at 128, 3e-4 at 1280 and beyond)."""
    return max(3e-4, 3e-3 * min(1.0, 128 / config.dim))


def _wrapped_in(settings: Settings) -> str | None:
    return "bf16" if settings.dtype == "bf16" else None


def _computing(settings: Settings, device: torch.device, wrap: str) -> AbstractContextManager[Any]:
    """Return the context of a forward pass; FSDP casts by itself."""
    if settings.dtype != "bf16" or wrap in ("fsdp", "fsdp2"):
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def _reduced(model: nn.Module, settings: Settings, wrap: str) -> Tensor:
    """Reduce gradients over the ranks that no wrapper reduces over, clip them; return the norm."""
    axes = ("data", "context") if settings.cp > 1 else ("data",)  # whose ranks see other tokens
    ezpz_tp.finalize_grads(model, average_over=axes if wrap == "none" else ())
    return ezpz_tp.clip_grad_norm_(model.parameters(), _LARGEST_NORM)


class _Whole:
    """All layers on each rank, whole or split by tensor and context parallel ranks."""

    def __init__(self, settings: Settings, model: Llama, device: torch.device, wrap: str) -> None:
        self._settings, self._bare, self._device, self.wrap = settings, model, device, wrap
        self.model: nn.Module = model
        rate = _learning_rate(model.config)
        dtype = _wrapped_in(settings)
        if wrap == "none":
            model.to(device)
        elif wrap == "fsdp2":
            self.model = ezpz_dist.wrap_model_for_fsdp2(model, dtype=dtype)
        elif wrap == "fsdp":
            self.model = ezpz_dist.wrap_model_for_fsdp(model, dtype=dtype)
        else:
            self.model = ezpz_dist.wrap_model_for_ddp(model)
        self._optimizer: torch.optim.Optimizer
        if wrap == "zero1":
            self._optimizer = ezpz_dist.wrap_optimizer_for_zero1(
                torch.optim.AdamW, self.model.parameters(), lr=rate
            )
        else:
            self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        own = [self._bare.shard_sequence(each) for each in (tokens, targets)]
        with _computing(self._settings, self._device, self.wrap):
            loss: Tensor = self.model(*own)
        loss.backward()
        if self.wrap == "fsdp":
            norm: Tensor = self.model.clip_grad_norm_(_LARGEST_NORM)  # type: ignore[operator]  # FSDP1's own, which knows its shards
        else:
            norm = _reduced(self.model, self._settings, self.wrap)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach(), norm


class _Pipelined:
    """Some of the layers on each rank, in a pipeline."""

    def __init__(
        self, settings: Settings, config: LlamaConfig, device: torch.device, wrap: str
    ) -> None:
        self._settings, self._device, self.wrap = settings, device, wrap
        # One forward, one backward wants as many parts as stages; twice as many idle less.
        parts = 2 * settings.pp if settings.batch % (2 * settings.pp) == 0 else settings.pp
        self._pipeline = llama_pipeline(config, microbatches=parts, seed=settings.seed)
        self.model = self._pipeline.module.to(device)
        if wrap == "fsdp2":
            ezpz_dist.wrap_model_for_fsdp2(self.model, dtype=_wrapped_in(settings))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=_learning_rate(config))

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        if self._settings.cp > 1:
            tokens, targets = (ezpz_tp.shard_sequence(each, 1) for each in (tokens, targets))
        with _computing(self._settings, self._device, self.wrap):
            losses = self._pipeline.step(tokens, targets)
        norm = _reduced(self.model, self._settings, self.wrap)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return (None if losses is None else losses.mean()), norm


class _DeepSpeed:
    """DeepSpeed's engine, ZeRO stage 1."""

    wrap = "deepspeed"

    def __init__(self, settings: Settings, model: Llama) -> None:
        self.model: nn.Module = model
        self._engine = ezpz_dist.wrap_model_for_deepspeed(
            model,
            torch.optim.AdamW(model.parameters(), lr=_learning_rate(model.config)),
            zero_stage=1,
            dtype=_wrapped_in(settings),
            micro_batch_size=settings.batch,
            gradient_clipping=_LARGEST_NORM,
        )[0]

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        loss: Tensor = self._engine(tokens, targets)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach(), torch.as_tensor(self._engine.get_global_grad_norm())


_LINES = 8
"""So many lines tell how far the training is."""


def train(
    settings: Settings,
    trainer: Trainer,
    config: LlamaConfig,
    result: Result,
    folder: Path | None,
) -> None:
    """Train, until a value is not finite at the latest; fill in the result. Collective."""
    log = ezpz_obs.get_logger("test")
    text = load_text()
    if len(text) <= settings.seq:
        raise UsageError(
            f"--seq={settings.seq}; expected fewer than the {len(text)} bytes of text that are read"
        )
    rates = ezpz_obs.Throughput(
        tokens_per_step=result.tokens_per_step,
        flops_per_token=config.flops_per_token(settings.seq),
        dtype=settings.dtype,
    )
    with contextlib.ExitStack() as stack:
        history = None
        if folder is not None:
            made = ezpz_obs.History(folder, config=dataclasses.asdict(settings))
            history = stack.enter_context(made)
        for step in range(settings.steps):
            drawn = batch(
                text, step, seed=settings.seed, sequences=settings.batch, length=settings.seq
            ).to(get_torch_device())
            begun = time.perf_counter()
            loss, norm = trainer.step(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())
            result.not_finite, mean = _over_ranks(loss, norm)
            # The sum over the ranks has waited for the device.
            seconds = time.perf_counter() - begun
            result.seconds.append(seconds)
            result.losses.append(mean)
            if history is not None:
                metrics = {"loss": mean, "gradient_norm": norm, "step_s": seconds}
                line = history.update({**metrics, **rates.metrics(seconds)}, step=step)
                if step % max(1, settings.steps // _LINES) == 0 or step == settings.steps - 1:
                    log.info(line)
            if result.not_finite:
                break
        if history is not None:
            result.rates = rates.metrics(result.median_seconds())


def _over_ranks(loss: torch.Tensor | None, norm: torch.Tensor) -> tuple[str, float]:
    """Return what is not finite, or nothing, and the mean loss. Collective."""
    own = None if loss is None else float(loss)
    bad_loss = own is not None and not math.isfinite(own)
    bad_norm = not math.isfinite(float(norm))
    total = ezpz_dist.all_reduce(
        {
            "loss": own or 0.0, "known": int(own is not None),
            "bad_losses": int(bad_loss), "bad_norms": int(bad_norm),
        }
    )  # fmt: skip
    ranks = get_world_size()
    said = [
        f"the {what} is not finite on {total[name]} of {ranks} ranks"
        for what, name in (("loss", "bad_losses"), ("gradient's norm", "bad_norms"))
        if total[name]
    ]
    return "; ".join(said), total["loss"] / total["known"]


def find_disagreement(trainer: Trainer) -> str:
    """Return in what ranks differ that should not, the same text on all; or nothing. Collective."""
    said = ""
    try:
        with _whole(trainer):
            ezpz_tp.verify_replicated(trainer.model)
    except ezpz_tp.ReplicaError as error:
        said = " ".join(str(error).split())
    # Only the ranks of one group may have seen it.
    return next((one for one in ezpz_dist.all_gather_object(said) if one), "")


def _whole(trainer: Trainer) -> contextlib.AbstractContextManager[object]:
    """Return the context in which the parameters are what ranks can compare."""
    if trainer.wrap != "fsdp":
        return contextlib.nullcontext()
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415  # 0.6 s

    # FSDP1 keeps shards where parameters were: compared is what they make together.
    return FullyShardedDataParallel.summon_full_params(trainer.model, writeback=False)


_SMALL: dict[str, int | str] = {"seq": 128, "layers": 4, "dim": 128, "dtype": "fp32"}
_LARGE: dict[str, int | str] = {"seq": 1024, "layers": 12, "dim": 1024, "dtype": "bf16"}
"""What is trained where nothing is said: in seconds, on a CPU and on an accelerator."""


def run(words: Sequence[str]) -> int:
    """Run the test that the words ask for; return its exit status, on every rank. Collective."""
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
        for size in sizes:
            one = measure(size, device)
            _say(log, "all-reduce", bytes=size, seconds=float(f"{one.seconds:.3g}"))
            result.bandwidths.append(one)
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
            yield Path(made) / "test"


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
