"""What would tell a program about the surroundings of the tests, and not about its own."""

NOT_A_USERS = (
    "SLURM", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_", "PBS_", "PMI", "PALS_",
    "MPI_LOCAL", "OMPI_", "PRTE_", "MV2_", "FLUX_", "JSM_", "HYDRA_", "HYDI_", "EZPZ_", "LOG_FROM",
    "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "NODE_RANK", "MASTER_",
    "OMP_NUM_THREADS", "HOSTFILE",
)  # fmt: skip


def clean(env):
    """Return an environment without what launchers, schedulers and we set."""
    return {name: value for name, value in env.items() if not name.startswith(NOT_A_USERS)}
