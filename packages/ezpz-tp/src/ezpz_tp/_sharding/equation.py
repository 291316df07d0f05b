"""The letters of an einsum: one for each dim of each operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_letters


@dataclass(frozen=True, slots=True)
class Equation:
    """An einsum's operands and output, as their letters, and what they are called."""

    operands: tuple[str, ...]
    output: str
    names: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, names: Sequence[str] | None) -> Equation:
        """Return the equation that ``text`` writes in einsum's notation; spaces do not matter.

        Raises:
            ValueError: It is not one, or the names do not fit it.
        """
        written = "".join(text.split())
        if "." in written:
            raise ValueError(
                f"einsum {text!r} has an ellipsis; give every dim a letter, for that is how a "
                "placement names it"
            )
        if written.count("->") != 1:
            raise ValueError(
                f"einsum {text!r} does not say what comes out; expected one '->', as in "
                "'bsh,hf->bsf' ('ab->' for the sum)"
            )
        inputs, output = written.split("->")
        operands = tuple(inputs.split(","))
        for letters in (*operands, output):
            _check_letters(text, letters)
        for letter in output:
            if letter not in inputs:
                raise ValueError(f"einsum {text!r}: no operand has {letter!r} of the output")
        return cls(operands, output, _names(names, len(operands)))


def _check_letters(text: str, letters: str) -> None:
    for letter in letters:
        if letter not in ascii_letters:
            raise ValueError(f"einsum {text!r}: {letter!r} is not a letter a-z or A-Z")
        if letters.count(letter) > 1:
            raise ValueError(
                f"einsum {text!r}: {letter!r} is twice in {letters!r}; diagonals cannot be "
                "taken of shards. Take it before, by torch.diagonal"
            )


def _names(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """Return what the operands are called; the output is y, and gradients have a d before."""
    if names is None:
        names = ("x", "w")[:count] if count <= 2 else [f"x{n}" for n in range(1, count + 1)]
    if isinstance(names, str) or len(names) != count:
        raise ValueError(f"names={names!r}; expected one for each of {count} operands")
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"names={names!r}: {name!r} is not a name")
    taken = [*names, "y", *(f"d{name}" for name in names), "dy", "output"]
    for name in taken:
        if taken.count(name) > 1:
            raise ValueError(
                f"names={names!r}: {name!r} would be two things; the output is y, and the "
                "gradient of x is dx"
            )
    return tuple(names)
