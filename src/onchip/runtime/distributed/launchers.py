"""What MPI launchers tell the processes that they start. Loads no NumPy: who only starts ranks need not wait for it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from onchip.network.reading import is_count

# Hydra and srun --mpi=pmi2, PMIx, Open MPI.
_RANK_NAMES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
_SIZE_NAMES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")
# The number among those of its machine: of Open MPI, of Hydra (MPICH, Intel), of srun.
_LOCAL_NAMES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def launched_as(env: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The rank and the number of ranks that a launcher says; None for a process that none started.

    SLURM_NTASKS alone says nothing: a batch script has it, too.
    """
    rank = next((env[name] for name in _RANK_NAMES if name in env), "")
    size = next((env[name] for name in _SIZE_NAMES if name in env), "1")
    return (int(rank), int(size)) if is_count(rank) and is_count(size) else None


def is_one_of_many(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process and others with it."""
    launched = launched_as(env)
    return launched is not None and launched[1] > 1


def gpu_rank(local_rank: int, local_size: int, env: Mapping[str, str] = os.environ) -> int:
    """The number by which a rank takes a GPU, of its place among the ranks with which it shares memory.

    Ranks in a container each share none, and MPI takes each for a machine; the launcher knows better.
    """
    said = next((env[name] for name in _LOCAL_NAMES if name in env), "")
    return int(said) if local_size == 1 and is_count(said) else local_rank
