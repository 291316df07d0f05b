"""A launch inside a rank of another: refused, or cut off from the outer one's variables."""

from __future__ import annotations

from collections.abc import Mapping

from ezpz_launch._errors import UsageError
from ezpz_topo import FAMILIES, Topology, family

_OF_A_LAUNCHER = ("PMI_", "PMIX_", "PMI2_", "HYDI_", "OMPI_", "PRTE_", "PALS_", "MPI_LOCAL")
"""Beginnings of what an outer launcher tells its ranks besides who they are: an inner mpiexec, or
the MPI of its ranks, would join the outer world with it."""

_KEPT = ("PMIX_MCA_", "OMPI_MCA_", "PRTE_MCA_")
"""Settings, of the user or the site, that are as true inside."""


def refuse_nested(topology: Topology) -> None:
    """Refuse to launch in a rank of a launch.

    Raises:
        UsageError: This process is one of several ranks.
    """
    rank = topology.rank
    if rank.world_size > 1:
        raise UsageError(
            f"this process is rank {rank.rank} of {rank.world_size} already "
            f"({rank.sources['rank']}); expected to be started outside of a launch; --nested lets "
            f"every rank launch on its own host; unset {rank.sources['rank']} if it is left over"
        )


def outside_of_launch(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what tells a process that it is a rank."""
    slurm = family("slurm")
    named: set[str] = set()
    for known in FAMILIES:
        if known is not slurm:
            named |= {
                *known.rank,
                *known.world_size,
                *known.local_rank,
                *known.local_world_size,
                *known.node_rank,
                *known.num_nodes,
                *known.proof,
            }
    # The step's own variables tell where the job's cores are; that it has ranks is not said.
    named |= {*slurm.rank, *slurm.local_rank}
    if env.get("EZPZ_LAUNCHER") or env.get("TORCHELASTIC_RUN_ID"):
        # Where the outer ranks meet; of another launcher's rank it is the user's.
        named |= {"MASTER_ADDR", "MASTER_PORT"}
    return {
        name: value
        for name, value in env.items()
        if name not in named and (name.startswith(_KEPT) or not name.startswith(_OF_A_LAUNCHER))
    }
