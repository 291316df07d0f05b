"""What each rank of a test does: text, model, training, measurements."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TextIO

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
from .result import Result, write_page


def load_text() -> Tensor:
    """Return text, uint8 ``[bytes]``, which one rank reads and sends to the others. Collective."""
    text = None
    if torch.distributed.get_rank() == 0:
        sources = b"".join(path.read_bytes() for path in python_sources(most=2 << 20))
        text = torch.frombuffer(bytearray(sources), dtype=torch.uint8)
    found = ezpz_dist.broadcast(text, root=0)
    assert found is not None  # rank 0 has some
    return found.cpu()


def batch(text: Tensor, step: int, settings: Settings) -> Tensor:
    """Return the tokens of a step, int64 ``[batch, seq + 1]``, on the host."""
    # Any two steps of any two replicas draw by themselves; those that split one model get the same.
    words = f"{settings.seed} {step} {ezpz_tp.get_data_parallel_rank()}"
    drawn = hashlib.blake2b(words.encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(drawn, "little"))
    starts = torch.randint(len(text) - settings.seq, (settings.batch, 1), generator=generator)
    return text[starts + torch.arange(settings.seq + 1)].long()


_LARGEST_NORM = 1.0  # gradients are clipped to it


class Trainer:
    """A model in training: its layers whole, or split by tensor and context parallel ranks."""

    def __init__(
        self, settings: Settings, config: LlamaConfig, device: torch.device,
        shard_size: int | None = None,
    ) -> None:  # fmt: skip
        self.wrap, self._shard_size = settings.wrap, shard_size
        if self.wrap == "auto":
            replicas = ezpz_tp.get_state().size("data") * settings.cp
            self.wrap = "ddp" if replicas > 1 and settings.pp == 1 else "none"
        self.settings, self.device = settings, device
        self.dtype = "bf16" if settings.dtype == "bf16" else None  # what it is wrapped in
        # Smaller for wider models: 3e-3 at 128, 3e-4 at 1280 and beyond.
        self.rate = max(3e-4, 3e-3 * min(1.0, 128 / config.dim))
        self.model = self._build(config)

    def _build(self, config: LlamaConfig) -> nn.Module:
        parallel = self.settings.tp * self.settings.cp > 1
        # Without memory: no rank has to hold all of what is sharded.
        bare = Llama(config, parallel=parallel, seed=self.settings.seed, device="meta")
        wrapped: nn.Module = bare
        self._bare = bare
        if self.wrap == "none":
            bare.to_empty(device=self.device)
            bare.reset_parameters()
        elif self.wrap == "fsdp2":
            wrapped = ezpz_dist.wrap_model_for_fsdp2(
                bare, dtype=self.dtype, shard_size=self._shard_size
            )
        else:
            wrapped = ezpz_dist.wrap_model_for_ddp(bare)
        kind, parameters = torch.optim.AdamW, wrapped.parameters()
        self._optimizer: torch.optim.Optimizer
        if self.wrap == "zero1":
            self._optimizer = ezpz_dist.wrap_optimizer_for_zero1(kind, parameters, lr=self.rate)
        else:
            self._optimizer = kind(parameters, lr=self.rate)
        return wrapped

    def _computing(self) -> AbstractContextManager[Any]:
        if not self.dtype or self.wrap == "fsdp2":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _backward(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        own = [self._bare.shard_sequence(each) for each in (tokens, targets)]
        with self._computing():
            loss: Tensor = self.model(*own)
        loss.backward()
        return loss.detach()

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        """Train on ``[batch, s]``; return the loss where this rank knows it, and the norm."""
        loss = self._backward(tokens, targets)
        # Over the ranks that no wrapper reduces over: those that see other tokens.
        axes = ("data", "context") if self.settings.cp > 1 else ("data",)
        ezpz_tp.finalize_grads(self.model, average_over=axes if self.wrap == "none" else ())
        norm = ezpz_tp.clip_grad_norm_(self.model.parameters(), _LARGEST_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss, norm


class _Pipelined(Trainer):
    def _build(self, config: LlamaConfig) -> nn.Module:
        stages, seed = self.settings.pp, self.settings.seed
        # One forward, one backward wants as many parts as stages; twice as many idle less.
        parts = 2 * stages if self.settings.batch % (2 * stages) == 0 else stages
        self._pipeline = llama_pipeline(config, microbatches=parts, seed=seed)
        model = self._pipeline.module.to(self.device)
        if self.wrap == "fsdp2":
            ezpz_dist.wrap_model_for_fsdp2(model, dtype=self.dtype)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate)
        return model

    def _backward(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        with self._computing():
            losses = self._pipeline.step(
                *(self._pipeline.shard_sequence(each) for each in (tokens, targets))
            )
        return None if losses is None else losses.mean()


def train(trainer: Trainer, config: LlamaConfig, result: Result, folder: Path | None) -> None:
    """Train, until a value is not finite at the latest; fill in the result. Collective."""
    settings = trainer.settings
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
            drawn = batch(text, step, settings).to(trainer.device)
            begun = time.perf_counter()
            loss, norm = trainer.step(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous())
            result.not_finite, mean = _over_ranks(loss, norm)
            # The sum over the ranks has waited for the device.
            result.seconds.append(seconds := time.perf_counter() - begun)
            result.losses.append(mean)
            if history is not None:
                metrics = {"loss": mean, "gradient_norm": norm, "step_s": seconds}
                line = history.update({**metrics, **rates.metrics(seconds)}, step=step)
                # Eight lines tell how far it is.
                if step % max(1, settings.steps // 8) == 0 or step == settings.steps - 1:
                    log.info(line)
            if result.not_finite:
                break
        if history is not None:
            result.rates = rates.metrics(result.median_seconds())


def _over_ranks(loss: torch.Tensor | None, norm: torch.Tensor) -> tuple[str, float]:
    """Return what is not finite, or nothing, and the mean loss. Collective."""
    own = None if loss is None else float(loss)
    bad_loss = own is not None and not math.isfinite(own)
    total = ezpz_dist.all_reduce({
        "loss": own or 0.0, "known": int(own is not None), "bad_losses": int(bad_loss),
        "bad_norms": int(not math.isfinite(float(norm))),
    })  # fmt: skip
    said = [
        f"the {what} is not finite on {total[name]} of {get_world_size()} ranks"
        for what, name in (("loss", "bad_losses"), ("gradient's norm", "bad_norms"))
        if total[name]
    ]
    return "; ".join(said), total["loss"] / total["known"]


def find_disagreement(trainer: Trainer) -> str:
    """Return in what ranks differ that should not, the same text on all; or nothing. Collective."""
    said = ""
    try:
        ezpz_tp.verify_replicated(trainer.model)
    except ezpz_tp.ReplicaError as error:
        said = " ".join(str(error).split())
    # Only the ranks of one group may have seen it.
    return next((one for one in ezpz_dist.all_gather_object(said) if one), "")


# What is trained where nothing is said: in seconds, on a CPU and on an accelerator.
_SMALL: dict[str, Any] = {"seq": 128, "layers": 4, "dim": 128, "dtype": "fp32"}
_LARGE: dict[str, Any] = {"seq": 1024, "layers": 12, "dim": 1024, "dtype": "bf16"}


def run(words: Sequence[str]) -> int:
    """Run the test that the words ask for; return its exit status, on every rank. Collective."""
    try:
        ours, others = take(words)
        if others:
            raise UsageError(f"{others[0]!r} is no option of a test; see ezpz test --help")
        settings = parse(ours)
        with _standard_output(settings) as out:
            return _run(settings, out)
    except (UsageError, ezpz_tp.DegreeError, ModelError, TopoError, DeviceError) as error:
        # Topology and device are this process's, which may not even know its rank; the rest is of
        # the words and the number of ranks, so the same everywhere: one says it.
        if isinstance(error, (TopoError, DeviceError)) or get_rank() == 0:
            complain(str(error))
        return 2


def _run(settings: Settings, out: TextIO) -> int:
    ezpz_dist.setup_torch(
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
    # Its heads divide it: 12 tiles of a node want another width.
    unit = 2 * _heads(chosen["dim"], settings.tp)
    chosen = {**chosen, "dim": -(-chosen["dim"] // unit) * unit}
    missing = {name: value for name, value in chosen.items() if not getattr(settings, name)}
    settings = dataclasses.replace(settings, **missing)
    with _folder(settings) as folder:
        result = _test(settings, device, folder)
        told = folder is None or _tell(result, settings, folder, out)
    ezpz_dist.cleanup()
    return int(bool(result.failures()) or not told)


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
    trainer = (_Pipelined if settings.pp > 1 else Trainer)(settings, config, device)
    nodes = find_nodes()
    state = ezpz_tp.get_state()
    degrees = {axis: state.size(axis) for axis in ("tensor", "pipeline", "context", "data")}
    name = f"{get_device_properties()['name']} ({device.type})" if device.type != "cpu" else "cpu"
    result = Result(
        ranks=get_world_size(), nodes=len(nodes), device=name,
        backend=get_torch_backend(), degrees=degrees, wrap=trainer.wrap,
        parameters=config.parameters(),
        tokens_per_step=settings.batch * settings.seq * degrees["data"],
    )  # fmt: skip
    log = ezpz_obs.get_logger("test")
    _say(log, "training", ranks=result.ranks, wrap=result.wrap, **degrees)
    train(trainer, config, result, folder)
    result.disagreement = find_disagreement(trainer)
    if result.ranks > 1:
        sizes = default_sizes(device.type) if settings.sizes is None else settings.sizes
        for size in sizes:
            result.bandwidths.append(one := measure(size, device))
            _say(log, "all-reduce", bytes=size, seconds=float(f"{one.seconds:.3g}"))
        if settings.pairs:
            result.pairs = measure_pairs(
                nodes, max(sizes, default=default_sizes(device.type)[-1]), device,
                lambda done, of: _say(log, f"pairs of nodes: round {done} of {of}"),
            )  # fmt: skip
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


def _say(log: object, event: str, **values: object) -> None:
    if get_rank() == 0:
        log.info(event, **values)  # type: ignore[attr-defined]  # structlog's logger has no type


def _tell(result: Result, settings: Settings, folder: Path, out: TextIO) -> bool:
    """Write what was found, on rank 0; return whether it could be written."""
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
