"""The command line of an example: settings as ``--name=value``, and errors of one line."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import fire
import torch

from ezpz.examples import EXTRAS, said
from ezpz.models import ModelError
from ezpz_device import TORCH_DTYPES_MAP, DeviceError
from ezpz_dist import CheckpointError, DataError, SetupError, WrapError
from ezpz_obs import HistoryError, get_logger
from ezpz_topo import TopoError
from ezpz_tp import ParallelError


class UsageError(Exception):
    """A setting that cannot be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What every example can be told; a value of another type than its default is refused.

    Attributes:
        seed: Seed of the run.
        outdir: Where metrics.jsonl goes; default: outputs/EXAMPLE-DATE-TIME.
    """

    seed: int = dataclasses.field(default=42, metadata={"least": 0})
    outdir: str = ""

    def __init_subclass__(cls) -> None:
        # For the page of help: what the class below describes is told of this one, too.
        told = (inspect.getdoc(cls.__base__) or "").partition("Attributes:\n")[2]
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}\n{told}"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if kind is str:
                if type(value) is not str:
                    raise UsageError(f"--{field.name} {value}; expected --{field.name}={value}")
                if value not in (known := field.metadata.get("known", [value])):
                    raise UsageError(f"--{field.name}={value}; expected {' or '.join(known)}")
                continue
            least = field.metadata.get("least", 1)
            kinds = {bool: "True or False", int: f"a whole number from {least}"}
            expected = kinds.get(kind, "a number above 0")
            if kind is float and type(value) is int:
                object.__setattr__(self, field.name, float(value))
            elif type(value) is not kind:
                raise UsageError(f"--{field.name}={value}; expected {expected}")
            if (kind is int and value < least) or (kind is float and not value > 0):
                raise UsageError(f"--{field.name}={value}; expected {expected}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsSettings(Settings):
    """What every example that trains on handwritten digits can be told.

    Attributes:
        epochs: Passes over the training set.
        batch_size: Images a step, over all ranks together; rounded to as many on each.
        lr: Learning rate of AdamW.
    """

    epochs: int = 6
    batch_size: int = 64
    lr: float = 3e-3


S = TypeVar("S", bound=Settings)


def dtype_named(name: str) -> torch.dtype:
    """Return the type that products are computed in, of bf16, fp16 or fp32."""
    if name not in ("bf16", "fp16", "fp32"):
        raise UsageError(f"--dtype={name}; expected bf16, fp16 or fp32")
    return TORCH_DTYPES_MAP[name]


def require(*packages: str) -> None:
    """Raise ModuleNotFoundError if a package that is imported later is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def main(settings: type[S], train: Callable[[S], object]) -> None:
    """Run an example; what the user can mend is one line and exit status 2, not a traceback."""
    name = Path(sys.argv[0]).stem
    try:
        texts = [one.name for one in dataclasses.fields(settings) if type(one.default) is str]
        _refuse_unknown(settings, sys.argv[1:])
        words = _quoted(sys.argv[1:], texts)
        # Only the settings come from Fire: a misspelt one is refused before the training.
        given: S = fire.Fire(settings, words, name=name, serialize=lambda _settings: None)
        if not given.outdir:
            folder = time.strftime(f"outputs/{name}-%Y%m%d-%H%M%S")
            given = dataclasses.replace(given, outdir=folder)
        # Making the process group takes seconds too, and prints nothing.
        get_logger(name).info("setting up")
        train(given)
    except UsageError as error:
        sys.exit(said(name, str(error)))
    except (
        TopoError, DeviceError, SetupError, DataError, HistoryError,
        ModelError, CheckpointError, ParallelError, WrapError,
    ) as error:  # fmt: skip
        sys.exit(_of_this_rank(name, str(error)))
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(_of_this_rank(name, f"{error.filename}: {error.strerror}"))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        sys.exit(said(name, f"needs {missing}: pip install '{EXTRAS[missing]}'"))


def _refuse_unknown(settings: type[S], words: Sequence[str]) -> None:
    """Refuse a misspelt setting, of which Fire would print a page on each rank."""
    known = [field.name for field in dataclasses.fields(settings)]
    takes = False  # whether a value may follow: --lr 0.1
    for word in words:
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("--") and name not in (*known, *(f"no{k}" for k in known), "help"):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean --{close[0]}?" if close else f"expected --{', --'.join(known)}"
            raise UsageError(f"unknown setting {word}; {hint}")
        if not (word.startswith("-") or takes):
            raise UsageError(f"unknown word {word!r}; expected settings as --name=value")
        takes = word.startswith("--") and "=" not in word


def _of_this_rank(name: str, what: str) -> int:
    print(f"{name}: {what}", file=sys.stderr)
    return 2


def _quoted(words: Sequence[str], texts: Collection[str]) -> list[str]:
    """Return words with settings that are texts as Fire leaves them so: 2024_01 becomes 202401."""
    found: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        before = found[-1].removeprefix("--") if found and found[-1].startswith("--") else ""
        if equals and name.removeprefix("--") in texts:
            found.append(f"{name}={value!r}")
        elif before in texts and not word.startswith("-"):
            found[-1] += f"={word!r}"
        else:
            found.append(word)
    return found
