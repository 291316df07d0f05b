"""Megatron's ways to make and change groups besides those of the axes.

Source: NVIDIA/Megatron-LM megatron/core/parallel_state.py, 2026-08-22.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._groups.alone import Alone
from ezpz_tp._groups.default import get_state
from ezpz_tp._groups.ranks import RankLayout
from ezpz_tp._groups.state import ParallelState

__all__ = ["RankGenerator", "create_all_gather_groups", "create_group", "update_pg_timeout"]


def create_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> ProcessGroup:
    """Make a group: `torch.distributed.new_group`, which says who calls it.

    It is the caller's: `destroy_model_parallel` leaves it.
    """
    group: ProcessGroup = dist.new_group(
        None if ranks is None else list(ranks),
        timeout=timeout,
        backend=backend,
        pg_options=pg_options,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
    )
    return group


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: dict[str, Any] | None = None,  # noqa: ARG001 - a hint, as when initializing
) -> tuple[ProcessGroup, ProcessGroup | None]:
    """Make groups of the ranks over context and data once more, to communicate beside these.

    Collective: every rank calls this. They end with the state in use.

    Args:
        for_expert_parallelism: Of the ranks of ``expert_data``, too.
        timeout: Of these groups; None is the backend's own.
        nccl_comm_cfgs: Without effect.

    Returns:
        The group over context and data, and that of the experts: None where they are not asked
        for or not spread over ranks.
    """
    state = get_state()
    if state.layout is None:
        raise ParallelError(
            "create_all_gather_groups: the state was made of groups, not of degrees; make these "
            "with create_group"
        )
    wanted: list[tuple[str, ...]] = [("context", "data")]
    if for_expert_parallelism and state.size("expert") > 1:
        wanted.append(("expert_data",))
    made = ParallelState.of_layout(
        state.layout, wanted, {}, backend=None, timeout=timeout, apart=True
    )
    state.attach(made)
    return made.group(*wanted[0]), made.group(*wanted[1]) if wanted[1:] else None


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Set the timeout of a group, or of all that this rank is in, after a barrier of its ranks."""
    dist.barrier(pg)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    # Its names are private and untyped; nothing public sets a timeout.
    c10d: Any = distributed_c10d
    groups = list(c10d._world.pg_map) if pg is None else [pg]  # noqa: SLF001
    for group in groups:
        if not isinstance(group, Alone):
            c10d._set_pg_timeout(timeout, group)  # noqa: SLF001


class RankGenerator:
    """The ranks of every group, by Megatron-LM's names of axes: `ezpz_tp.RankLayout`.

    Args:
        tp: Degree of tensor parallelism, and so on for expert, data, pipeline and context.
        ep: See ``tp``. Either this or ``cp`` is 1.
        dp: See ``tp``.
        pp: See ``tp``.
        cp: See ``tp``.
        order: The axes from the fastest varying to the slowest, joined by ``-``.
        rank_offset: The number of the first rank.
        gtp_remat: Only 1.

    Raises:
        DegreeError: Both ``ep`` and ``cp`` are above 1, or the order lacks an axis.
        NotImplementedError: ``gtp_remat`` is not 1.
    """

    def __init__(
        self,
        tp: int,
        ep: int,
        dp: int,
        pp: int,
        cp: int,
        order: str,
        rank_offset: int = 0,
        gtp_remat: int = 1,
    ) -> None:
        if gtp_remat != 1:
            raise NotImplementedError(f"RankGenerator: gtp_remat={gtp_remat}; expected 1")
        if ep > 1 and cp > 1:
            raise DegreeError(
                f"RankGenerator: ep={ep} and cp={cp}; expected 1 of one of them, as experts lie on "
                "a grid of their own"
            )
        self.tp: int = tp
        self.ep: int = ep
        self.dp: int = dp
        self.pp: int = pp
        self.cp: int = cp
        self.gtp_remat: int = gtp_remat
        self.rank_offset: int = rank_offset
        self.world_size: int = tp * ep * dp * pp * cp
        sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp, "gtp_remat": 1}
        self.name_to_size: dict[str, int] = sizes
        given = order.lower().split("-")
        self.order: str = "-".join([*given, *(name for name in sizes if name not in given)])
        self.ordered_size: list[int] = [sizes.get(token, 0) for token in self.order.split("-")]
        # One axis of the two is of degree 1: the other has its place in the layout.
        self._axes = {
            "tp": "tensor",
            "dp": "data",
            "pp": "pipeline",
            "ep" if ep > 1 else "cp": "context",
        }
        tokens = [name for name in given if name in {"tp", "dp", "pp"} or sizes.get(name) != 1]
        self._layout = RankLayout(
            self.world_size,
            tensor=tp,
            context=cp * ep,
            pipeline=pp,
            order="-".join("cp" if name == "ep" else name for name in tokens),
        )

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the ranks of every group that spans axes, such as ``"tp"`` or ``"tp-dp"``.

        Raises:
            ValueError: There is no such axis.
        """
        wanted = token.split("-")
        for name in wanted:
            if name not in self.name_to_size:
                raise ValueError(f"axis {name!r}; expected one of {', '.join(self.name_to_size)}")
        axes = [self._axes[name] for name in wanted if self.name_to_size[name] > 1]
        return [[rank + self.rank_offset for rank in ranks] for ranks in self._layout.groups(axes)]
