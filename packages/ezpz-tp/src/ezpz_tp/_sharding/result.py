"""What the calculator answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .equation import Equation
from .placement import complete, read, to_torch
from .steps import Step
from .table import table

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class EinsumSharding:
    """Where everything in a sharded einsum is, and what is sent; see `einsum_sharding`.

    ``str()`` of it is a table. Placements are texts as `einsum_sharding` reads them, in the
    order of the axes: ``"b@data f@tensor"``, or ``"replicated"``.

    Args:
        equation: As it was given.
        names: What the operands are called: x and w. The output is y, gradients dx, dw, dy.
        axes: The axes of the mesh, from the outermost.
        operands: The placements of the operands, as given.
        output: The placements of the output.
        gradients: For each operand, where the gradient is that comes out of the local product:
            partial is what `backward` then has to sum. Afterwards it lies as its operand, or is
            replicated if that is partial.
        forward: The steps of forward, in order.
        backward: The steps of backward, in order.
        regions: The calls of this package's region functions, in order, that do those of
            the steps that are over the tensor axis.
        shapes: The local shape of each operand as given, and of y; None without sizes.
    """

    equation: str
    names: tuple[str, ...]
    axes: tuple[str, ...]
    operands: tuple[str, ...]
    output: str
    gradients: tuple[str, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    regions: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]] | None = field(hash=False)

    @property
    def bytes(self) -> int | None:
        """Bytes that each rank sends in forward and backward; None without sizes."""
        if self.shapes is None:
            return None
        return sum(step.bytes or 0 for step in (*self.forward, *self.backward))

    def placements(self, of: str | int = "output") -> tuple[Placement, ...]:
        """Return torch's placements of a tensor, one for each of ``axes``.

        Args:
            of: An operand by its number or name; ``"output"`` or ``"y"``; or a gradient as it
                leaves the local product, ``"dx"``.

        Raises:
            ValueError: There is no such tensor.
        """
        for name, letters, layout in self.rows():
            if name == of:
                return self._to_torch(layout, letters)
        if of == "output":
            return self.placements("y")
        if isinstance(of, int) and -len(self.names) <= of < len(self.names):
            return self.placements(self.names[of])
        raise ValueError(
            f"no tensor {of!r} in {self.equation!r}; expected 'output', an operand's number below "
            f"{len(self.names)}, or one of {', '.join(name for name, _, _ in self.rows())}"
        )

    def rows(self) -> list[tuple[str, str, str]]:
        """Return name, letters and placements of the operands, the output, and the gradients."""
        equation = Equation.parse(self.equation, self.names)
        operands, gradients = (
            list(zip(self.names, equation.operands, layouts, strict=True))
            for layouts in (self.operands, self.gradients)
        )
        return [
            *operands,
            ("y", equation.output, self.output),
            *((f"d{name}", letters, layout) for name, letters, layout in gradients),
        ]

    def _to_torch(self, layout: str, letters: str) -> tuple[Placement, ...]:
        told, _ = read(layout, letters, "", self.axes)
        return to_torch(complete(told, self.axes), letters)

    def __str__(self) -> str:
        return table(self)
