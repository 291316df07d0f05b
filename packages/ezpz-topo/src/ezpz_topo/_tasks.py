"""Slurm's compressed task counts: ``4(x2),3`` is 4, 4, 3 in the order of the nodelist."""

from __future__ import annotations

import re

from ._errors import InvalidVariableError

_ITEM = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def tasks_on_node(text: str, node_rank: int, *, variable: str) -> int:
    """Return the number of tasks on one node.

    Args:
        text: Such as ``"4(x2),3"``.
        node_rank: Index of the node in the nodelist, from 0.
        variable: The name of the variable that ``text`` was read from, for errors.

    Raises:
        InvalidVariableError: The text does not parse, or has fewer nodes than that.

    Source: slurm's ``srun`` manual, SLURM_TASKS_PER_NODE; checked on Slurm 22.05.8.
    """
    left = node_rank
    for item in text.split(","):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise InvalidVariableError(
                f"{variable}={text!r}: {item!r} does not parse; expected counts such as 4(x2),3"
            )
        repeat = int(match[2] or 1)
        if left < repeat:
            return int(match[1])
        left -= repeat
    raise InvalidVariableError(
        f"{variable}={text!r} tells of {node_rank - left} nodes; expected more than {node_rank}"
    )
