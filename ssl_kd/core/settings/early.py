"""Check paths and launchers without importing torch, which takes seconds."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from ssl_kd.core.errors import DatasetUnavailable, RunFolderError

DATASETS = ("digits", "cifar10", "cifar100", "stl10", "fashion_mnist", "imagenet")
TEXT_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson")
"""Suffixes of tables that are text files."""
FEATURE_FILES = (
    ".npy",
    ".npz",
    ".pt",
    ".pth",
    ".safetensors",
    ".parquet",
    ".h5ad",
    *TEXT_TABLES,
)
"""Suffixes of files that hold features, or a table of samples."""
FILE_LIST = ".files"
"""Suffix of a list of image files, which `ssl_kd watch` writes."""

LAUNCHERS = {  # environment variable with the number of processes -> variable with the rank
    "WORLD_SIZE": "RANK",  # torchrun, accelerate
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",  # mpirun of Open MPI
    "PMI_SIZE": "PMI_RANK",  # mpiexec of MPICH and Intel MPI
    # srun. SLURM_NTASKS is set for a job's batch script, too, which is one process.
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}


def home_resolved(name: str) -> Path:
    """Return a path with `~` expanded; leave it unchanged if there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def dataset_path(name: str) -> Path:
    """Return the path of a data set that is a folder, a file of features or a table."""
    path = home_resolved(name)
    if path.is_dir() or (path.suffix.lower() in (*FEATURE_FILES, FILE_LIST) and path.is_file()):
        return path
    close = difflib.get_close_matches(name.lower(), DATASETS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise DatasetUnavailable(
        f"{name!r} is neither the name of a data set ({', '.join(DATASETS)}), nor a folder, nor a "
        f"file of features or a table ({' '.join(FEATURE_FILES)}){hint}"
    )


def check_dataset(name: str | None) -> None:
    """Raise DatasetUnavailable if a value is neither a data set's name nor a path to one."""
    if name is not None and name not in DATASETS:
        dataset_path(name)


def is_run(name: str) -> bool:
    """Return whether a value is the path of a run folder; False for a data set.

    Raises:
        RunFolderError: the value is neither of them.
    """
    path = home_resolved(name)
    if (path / "config.json").is_file():
        return True
    if any(path.glob("*/config.json")):
        raise RunFolderError(f"{path} is a folder of runs: give one, such as {path / 'latest'}")
    try:
        check_dataset(name)
    except DatasetUnavailable as error:
        raise RunFolderError(f"{path} is not a run folder (no config.json), and {error}") from error
    return False


def run_folder(name: str | Path) -> Path:
    """Return the path of a run folder, with `~` expanded; raise RunFolderError if it is none."""
    path = home_resolved(str(name))
    if not (path / "config.json").is_file():
        raise RunFolderError(
            f"{path} is not a run folder (no config.json): give one, such as runs/latest"
        )
    return path


def run_to_extend(name: str, runs: str) -> Path:
    """Return the run folder that EXTEND names: a path, or the name of a run in RUNS_DIR."""
    places = [home_resolved(name), Path(runs) / name]
    folder = next((place for place in places if (place / "config.json").is_file()), None)
    if folder is None:
        raise RunFolderError(
            f"EXTEND is {name!r}, but neither {places[0]} nor {places[1]} is a run folder "
            "(no config.json): name a finished run"
        )
    return folder


def check_run_name(path: Path, resume: bool) -> None:
    """Check that a run to resume exists, or that the folder of a new run is free."""
    if resume:
        if not (path / "config.json").exists():
            raise RunFolderError(
                f"{path} holds no run to resume (no config.json): leave out --resume to start one"
            )
    elif path.exists() and (
        not path.is_dir() or {file.name for file in path.iterdir()} - {".lock"}
    ):
        finished = (path / "metrics.json").exists()
        what = "a finished run" if finished else "an unfinished run or something else"
        raise RunFolderError(
            f"{path} already holds {what}: choose another --run_name, remove the folder, or "
            "continue an unfinished run by --resume"
        )


def launched_as(environment: Mapping[str, str]) -> tuple[int, int, str] | None:
    """Return rank, number of processes, and the names of the variables that define them.

    The result is None if no launcher (torchrun, mpirun, srun) started several processes.
    """
    for size, rank in LAUNCHERS.items():
        count, place = environment.get(size, ""), environment.get(rank, "")
        if count.isdecimal() and int(count) > 1 and place.isdecimal():
            return int(place), int(count), f"{rank} and {size}"
    return None
