"""The environment that MPI launchers set. Imports no NumPy, so that starting ranks is quick."""

from __future__ import annotations

import os
from collections.abc import Mapping

from onchip.network.reading import is_count

# Hydra and srun --mpi=pmi2, PMIx, Open MPI.
_RANK_NAMES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_SIZE_NAMES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
# The rank within its machine: Open MPI, Hydra (MPICH, Intel), srun.
_LOCAL_NAMES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def launched_as(env: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The rank and the number of ranks from the launcher's environment; None if no launcher started this process.

    SLURM_NTASKS alone is not enough: a batch script has it, too.
    """
    rank = next((env[name] for name in _RANK_NAMES if name in env), "")
    size = next((env[name] for name in _SIZE_NAMES if name in env), "1")
    return (int(rank), int(size)) if is_count(rank) and is_count(size) else None


def is_one_of_many(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process together with others."""
    launched = launched_as(env)
    return launched is not None and launched[1] > 1


def gpu_rank(local_rank: int, local_size: int, env: Mapping[str, str] = os.environ) -> int:
    """The index by which a rank selects a GPU, from its rank within its machine.

    Ranks in separate containers share no memory, so MPI counts each as a machine; then the launcher's value is used.
    """
    launcher_rank = next((env[name] for name in _LOCAL_NAMES if name in env), "")
    return int(launcher_rank) if local_size == 1 and is_count(launcher_rank) else local_rank
