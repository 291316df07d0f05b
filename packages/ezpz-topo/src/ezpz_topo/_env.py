"""Launcher -> environment variables, as one table: the only place that names them.

Measured with MPICH 5.0.2 (Hydra), Open MPI 5.0.11, Slurm 22.05.8 and torchrun 2.13;
families with ``measured=False`` are read from their site's or vendor's documentation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """The variables in which one launcher gives a process its rank.

    Each field lists alternatives, best first; the first one set is used. An empty
    field means that this launcher has no such variable.
    """

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]
    node_rank: tuple[str, ...] = ()
    proof: tuple[str, ...] = ()
    """Variables without which the others prove nothing: the family then counts as absent."""
    disproof: tuple[str, ...] = ()
    """Values of these variables that prove the contrary: no launcher of ranks was at work."""
    tasks_per_node: str = ""
    """A variable such as ``4(x2),3`` that gives the local world size at ``node_rank``."""
    num_nodes: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    """Names of the processes that start its ranks, or the Python modules and scripts that do."""
    measured: bool = True
    """False where the names come from documentation and have not been run by us."""
    launcher: str = ""
    """Its command's kind, in the words of a machine's file and of ``ezpz-launch --launcher``."""


EZPZ = Family(
    name="ezpz", rank=("EZPZ_RANK",), world_size=("EZPZ_WORLD_SIZE",),
    local_rank=("EZPZ_LOCAL_RANK",), local_world_size=("EZPZ_LOCAL_WORLD_SIZE",),
    node_rank=("EZPZ_NODE_RANK",), num_nodes=("EZPZ_NUM_NODES",),
)  # fmt: skip
"""The launch variables: set for each rank by ezpz-launch, from those of its launcher."""

EZPZ_LAUNCHER = "EZPZ_LAUNCHER"  # the family that the launch variables were taken from
EZPZ_JOB_ID = "EZPZ_JOB_ID"  # the scheduler's job in which they were set

EZPZ_LOCAL_DEVICE = "EZPZ_LOCAL_DEVICE"
"""The index of the rank's own device: what ``LOCAL_RANK`` is to torchrun's scripts."""

TORCHRUN = Family(
    name="torchrun",
    rank=("RANK",),
    world_size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    # LOCAL_SIZE is set by DeepSpeed's launcher alone; below another launcher LOCAL_WORLD_SIZE
    # can be that one's.
    local_world_size=("LOCAL_SIZE", "LOCAL_WORLD_SIZE"),
    node_rank=("GROUP_RANK", "NODE_RANK"),
    num_nodes=("GROUP_WORLD_SIZE",),
    processes=(
        "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate",
        "accelerate.commands.launch", "deepspeed.launcher.launch",
    ),
    launcher="torchrun",
)  # fmt: skip
"""Also what DeepSpeed's launcher, accelerate and hand-written scripts export."""

TORCHRUN_PROOF = "TORCHELASTIC_RUN_ID"
"""Only torchrun itself sets it; without it the set may be a leftover of the user's shell."""

SLURM_SHELL_STEPS = ("4294967290", "4294967291", "4294967292")
"""SLURM_STEP_ID of the steps that a shell runs in and no ranks: the interactive one of salloc
and ``srun --interactive``, the batch script, what PAM adopted (slurm.h, SLURM_INTERACTIVE_STEP,
SLURM_BATCH_SCRIPT, SLURM_EXTERN_CONT: 2**32 - 6, - 5, - 4)."""

LAUNCHERS: tuple[Family, ...] = (
    Family(
        name="openmpi",
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        # OMPI_COMM_WORLD_NODE_RANK is the rank on the node, not the node's index.
        # Beside the launcher itself (of version 4: mpirun, mpiexec, orterun) there is no daemon.
        processes=("prted", "prterun", "orted", "orterun", "mpirun", "mpiexec"),
        launcher="openmpi",
    ),
    Family(
        name="mvapich2",
        rank=("MV2_COMM_WORLD_RANK",),
        world_size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
        processes=("mpispawn",),
        measured=False,
    ),
    Family(
        name="pals",
        rank=("PALS_RANKID",),
        # With PMIx (Aurora) PALS sets no world size at all: ezpz-launch exports it.
        world_size=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID",),
        local_world_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        node_rank=("PALS_NODEID",),
        processes=("palsd", "apinit"),
        measured=False,
        launcher="pals",
    ),
    Family(
        name="pmi",
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        # MPICH Hydra and Intel MPI set MPI_LOCAL*, Cray PMI sets PMI_LOCAL_*.
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        processes=("hydra_pmi_proxy", "pmi_proxy"),
        launcher="hydra",
    ),
    Family(
        name="pmix",
        # prterun sets nothing else, so that this is always half: to be contradicted, or an error.
        rank=("PMIX_RANK",),
        world_size=(),
        local_rank=(),
        local_world_size=(),
    ),
    Family(
        name="flux",
        rank=("FLUX_TASK_RANK",),
        world_size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        local_world_size=(),
        processes=("flux-shell",),
        measured=False,
    ),
    Family(
        name="jsrun",
        rank=("JSM_NAMESPACE_RANK",),
        world_size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_world_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        processes=("jsmd",),
        measured=False,
    ),
    Family(
        name="slurm",
        rank=("SLURM_PROCID",),
        # SLURM_NTASKS is the job's; a step may be smaller.
        world_size=("SLURM_STEP_NUM_TASKS",),
        local_rank=("SLURM_LOCALID",),
        local_world_size=(),
        node_rank=("SLURM_NODEID",),
        # A batch script's body has SLURM_PROCID=0 and no step: it is one process.
        proof=("SLURM_STEP_ID",),
        disproof=SLURM_SHELL_STEPS,
        tasks_per_node="SLURM_STEP_TASKS_PER_NODE",
        num_nodes=("SLURM_STEP_NUM_NODES",),
        processes=("slurmstepd",),
        launcher="srun",
    ),
)
"""In order of trust: MPI ranks inside a Slurm step carry the SLURM_PROCID of their *proxy*."""

FAMILIES: tuple[Family, ...] = (EZPZ, TORCHRUN, *LAUNCHERS)
_BY_NAME = {each.name: each for each in FAMILIES}


def family(name: str) -> Family:
    """Return the family of that name.

    Raises:
        KeyError: No launcher of that name is in the table.
    """
    return _BY_NAME[name]
