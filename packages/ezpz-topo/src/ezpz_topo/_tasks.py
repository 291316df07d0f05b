"""Slurm's compressed task counts: ``4(x2),3`` is 4, 4, 3 in the order of the nodelist."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ._errors import InvalidVariableError

_ITEM = r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?"


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
    for tasks, nodes in _items(text, variable):
        if left < nodes:
            return tasks
        left -= nodes
    raise InvalidVariableError(
        f"{variable}={text!r} tells of {node_rank - left} nodes; expected more than {node_rank}"
    )


def tasks_of_nodes(text: str, num_nodes: int, *, variable: str) -> tuple[int, ...]:
    """Return the number of tasks on each of so many nodes.

    Raises:
        InvalidVariableError: The text does not parse, or tells of another number of nodes.
    """
    counts = list(_items(text, variable))
    told = sum(nodes for _, nodes in counts)
    # Before they are made: a repeat can have nine digits.
    if told != num_nodes:
        raise InvalidVariableError(
            f"{variable}={text[:60]!r} tells of {told} nodes; expected {num_nodes}, as the "
            "nodelist has; unset the variable that is a leftover of another job"
        )
    return tuple(tasks for tasks, nodes in counts for _ in range(nodes))


def _items(text: str, variable: str) -> Iterator[tuple[int, int]]:
    """Yield (tasks, number of nodes with so many)."""
    for item in text.split(","):
        match = re.fullmatch(_ITEM, item)
        if match is None:
            raise InvalidVariableError(
                f"{variable}={text!r}: {item!r} does not parse; expected counts such as 4(x2),3"
            )
        yield int(match[1]), int(match[2] or 1)
