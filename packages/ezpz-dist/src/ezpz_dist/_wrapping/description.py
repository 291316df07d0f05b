"""What was found of a model, and a table of it."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class WrappedUnit:
    """A module that is gathered, or reduced, by itself; or all that is not in another.

    Attributes:
        name: Its path in the model; "" for the model itself.
        kind: Its class.
        wrapper: ``"DDP"``, ``"FSDP1"``, ``"FSDP2"``, ``"DeepSpeed ZeRO-2"``; None: bare.
        parameters: Elements of its parameters over all ranks that share them, each counted once,
            those of units inside aside.
        trainable: How many of these require a gradient.
        held: How many of these are on this rank.
        bytes: What this rank's parameters take.
        buffer_bytes: What its buffers take, on this rank.
        dtype: What most of the parameters are kept in: ``"float32"``; "" without parameters.
        compute_dtype: What is computed in, where it is another.
        reduce_dtype: What gradients are reduced in, where it is another.
        reshards: Whether parameters are freed after forward; None: not sharded, or not known.
        mesh: Over which axes: ``"replicate 2 x shard 4"``; "" where there are none.
    """

    name: str
    kind: str
    wrapper: str | None
    parameters: int
    trainable: int
    held: int
    bytes: int
    buffer_bytes: int
    dtype: str
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    reshards: bool | None = None
    mesh: str = ""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What `describe` found. ``str()`` is a table of the units.

    Attributes:
        kind: The model's class.
        units: In the order of the model; the first is what is left over.
    """

    kind: str
    units: tuple[WrappedUnit, ...]

    @property
    def wrapper(self) -> str | None:
        """What the model is wrapped by; None: bare."""
        return next((unit.wrapper for unit in self.units if unit.wrapper), None)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, over all ranks that share them."""
        return sum(unit.parameters for unit in self.units)

    @property
    def trainable(self) -> int:
        """Elements of those that require a gradient."""
        return sum(unit.trainable for unit in self.units)

    @property
    def held(self) -> int:
        """Elements of parameters on this rank."""
        return sum(unit.held for unit in self.units)

    @property
    def bytes(self) -> int:
        """Bytes of parameters on this rank, while no unit is gathered."""
        return sum(unit.bytes for unit in self.units)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of buffers on this rank."""
        return sum(unit.buffer_bytes for unit in self.units)

    def __str__(self) -> str:
        rows = [
            ("unit", "class", "by", "parameters", "here", "bytes here", "type", "after forward")
        ]
        for like, names in _alike(self.units):
            first = like.name or "(rest)" if len(self.units) > 1 else like.name or "(all)"
            rows.append(
                (
                    first if len(names) == 1 else f"{first} ... {names[-1]} ({len(names)}x)",
                    like.kind,
                    (like.wrapper or "-") + (f" {like.mesh}" if like.mesh else ""),
                    f"{like.parameters:,}",
                    f"{like.held:,}",
                    _bytes(like.bytes),
                    _types(like),
                    {None: "-", True: "freed", False: "kept"}[like.reshards],
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        right = (3, 4, 5)
        lines = [
            "  ".join(
                cell.rjust(width) if column in right else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        share = f", {self.held / self.parameters:.1%} of it here" if self.parameters else ""
        total = (
            f"{self.kind}: {self.parameters:,} parameters ({self.trainable:,} trainable){share}: "
            f"{_bytes(self.bytes)}, and {_bytes(self.buffer_bytes)} of buffers"
        )
        return "\n".join([total, *lines])


def _types(unit: WrappedUnit) -> str:
    text = unit.dtype or "-"
    if unit.compute_dtype:
        text += f", computes in {unit.compute_dtype}"
    if unit.reduce_dtype:
        text += f", reduces in {unit.reduce_dtype}"
    return text


def _alike(units: tuple[WrappedUnit, ...]) -> list[tuple[WrappedUnit, list[str]]]:
    """Put units that differ by name alone in one row, where the first of them is."""
    rows: dict[WrappedUnit, list[str]] = {}
    for unit in units:
        rows.setdefault(replace(unit, name=""), []).append(unit.name)
    return [(replace(like, name=names[0]), names) for like, names in rows.items()]


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
