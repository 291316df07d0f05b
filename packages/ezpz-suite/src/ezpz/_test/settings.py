"""What a test is to do: our options, parsed by Fire and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .options import UsageError

WRAPS: Final = ("auto", "ddp", "fsdp", "fsdp2", "zero1", "deepspeed", "none")
_AROUND_PIPELINE: Final = ("auto", "none", "fsdp2")
"""What goes around a pipeline's part: of the others each backward pass would reduce."""

_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_FEWEST: Final = {"steps": 4, "seed": 0}
_LARGEST: Final = 2**31 - 1


@dataclass(frozen=True)
class Settings:
    """A test, as asked. A number that is 0 is chosen by the device.

    Attributes:
        tp: Tensor-parallel degree.
        pp: Pipeline-parallel degree.
        cp: Context-parallel degree.
        wrap: One of `WRAPS`.
        steps: Steps of the training.
        batch: Sequences a step of each data-parallel rank.
        seq: Tokens of a sequence.
        layers: Layers of the model.
        dim: Width of the model.
        dtype: ``fp32`` or ``bf16``; empty: by the device.
        seed: Of weights and data.
        sizes: Bytes of the messages to all-reduce; None: by the device.
        pairs: Whether to measure each pair of nodes.
        json: Whether the result is written for programs.
        outdir: Where the run is kept; empty: nowhere.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    wrap: str = "auto"
    steps: int = 40
    batch: int = 8
    seq: int = 0
    layers: int = 0
    dim: int = 0
    dtype: str = ""
    seed: int = 42
    sizes: tuple[int, ...] | None = None
    pairs: bool = False
    json: bool = False
    outdir: str = ""

    def __post_init__(self) -> None:
        if self.wrap not in WRAPS:
            raise UsageError(f"--wrap={self.wrap}; expected one of {', '.join(WRAPS)}")
        if self.dtype not in ("", "fp32", "bf16"):
            raise UsageError(f"--dtype={self.dtype}; expected fp32 or bf16")
        if self.pp > 1 and self.wrap not in _AROUND_PIPELINE:
            raise UsageError(
                f"--wrap={self.wrap} with --pp={self.pp}; expected none or fsdp2: around a "
                "pipeline's part, which runs several times a step, no other goes"
            )
        if self.wrap == "fsdp" and self.tp > 1:
            raise UsageError(
                f"--wrap=fsdp with --tp={self.tp}; expected fsdp2: FSDP1 knows nothing of tensor "
                "parallel shards, and would clip each rank's gradient by another norm"
            )
        if self.wrap == "deepspeed" and self.cp > 1:
            raise UsageError(
                f"--wrap=deepspeed with --cp={self.cp}; expected ddp, fsdp2, zero1 or none: "
                "DeepSpeed averages gradients over data-parallel ranks only"
            )
        if self.pp > 1 and self.batch % self.pp:
            raise UsageError(
                f"--batch={self.batch} with --pp={self.pp}; expected a multiple of {self.pp}: the "
                "pipeline runs so many parts of a batch at once"
            )

    def words(self) -> list[str]:
        """Return the words that `parse` makes these settings of."""
        found = []
        for name, value in vars(self).items():
            if value == getattr(Settings, name):
                continue
            if isinstance(value, tuple):
                value = ",".join(map(str, value)) or "none"  # noqa: PLW2901
            found.append(f"--{name}" if value is True else f"--{name}={value}")
        return found


def parse(words: Sequence[str]) -> Settings:
    """Let Fire parse the words of `options.take`.

    Raises:
        UsageError: A value is not what its option takes, or options contradict each other.
    """
    import fire  # noqa: PLC0415  # 50 ms, which a page of help need not wait for

    found: list[Settings] = []

    def test(
        *,
        tp: int = 1, pp: int = 1, cp: int = 1, steps: int = 40, batch: int = 8,
        seq: int = 0, layers: int = 0, dim: int = 0, seed: int = 42,
        pairs: bool = False, json: bool = False,
        wrap: str = "auto", dtype: str = "", sizes: str = "", outdir: str = "",
    ) -> None:  # fmt: skip
        numbers = {
            "tp": tp, "pp": pp, "cp": cp, "steps": steps, "batch": batch, "seq": seq,
            "layers": layers, "dim": dim, "seed": seed,
        }  # fmt: skip
        given = {word[2:].partition("=")[0] for word in words}
        for name in given & numbers.keys():
            fewest, number = _FEWEST.get(name, 1), numbers[name]
            if type(number) is not int or not fewest <= number <= _LARGEST:
                raise UsageError(f"--{name}={number}; expected a whole number, {fewest} or more")
        found.append(
            Settings(
                **numbers, wrap=wrap, dtype=dtype, sizes=_sizes(sizes), pairs=pairs, json=json,
                outdir=outdir,
            )
        )  # fmt: skip

    # Text stays text: Fire would make a number of --outdir=2024.
    command = fire.decorators.SetParseFns(wrap=str, dtype=str, sizes=str, outdir=str)(test)
    fire.Fire(command, command=list(words), name="ezpz test")
    return found[0]


def _sizes(text: str) -> tuple[int, ...] | None:
    """Return the bytes of ``4K,1M``, in order; None of nothing, none of ``none``."""
    if not text or text == "none":
        return () if text else None
    found = []
    for one in text.split(","):
        digits, unit = (one[:-1], _UNITS[one[-1]]) if one[-1:] in _UNITS else (one, 1)
        if not (digits.isascii() and digits.isdecimal() and len(digits) < 16):
            raise UsageError(f"--sizes={text}: {one!r}; expected sizes in bytes such as 4K,1M,64M")
        size = int(digits) * unit
        if size < 4 or size % 4:
            raise UsageError(f"--sizes={text}: {one}; expected a multiple of 4 bytes (float32)")
        found.append(size)
    return tuple(sorted(set(found)))
