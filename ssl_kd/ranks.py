"""Processes that were started together: refused, until training is distributed."""

from __future__ import annotations

import os

from ssl_kd.errors import InputError

_LAUNCHERS = {  # how many were started -> which of them this is
    "WORLD_SIZE": "RANK",  # torchrun, accelerate
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",  # mpirun of Open MPI
    "PMI_SIZE": "PMI_RANK",  # mpiexec of MPICH and Intel MPI
    # srun. SLURM_NTASKS is what a job was granted: its batch script, one process, has it as well.
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}


def refuse_ranks() -> None:
    """Let no process train that a launcher (torchrun, mpirun, srun) started as one of several.

    Each would train a model of its own in a folder of its own, and none would tell.

    Raises:
        InputError: a launcher's variable counts more than one; the message names this process's
            rank.
    """
    for size, rank in _LAUNCHERS.items():
        count = os.environ.get(size, "")
        if count.isdecimal() and int(count) > 1:
            raise InputError(
                f"This is rank {os.environ.get(rank, 'unknown')} of {count} ({size}), but one"
                " process trains on one device: each would train a model of its own. Start it with"
                " python alone, not torchrun, mpirun or srun with several tasks; for several GPUs"
                " one run for each, --device cuda:0, cuda:1 ..."
            )
