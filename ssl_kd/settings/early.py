"""What can be refused before torch is imported, which takes seconds: paths, and launchers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from ssl_kd.errors import DatasetUnavailable, RunFolderError, printable

DATASETS = ("digits", "cifar10", "cifar100", "stl10", "fashion_mnist", "imagenet")
FEATURE_FILES = (".npy", ".npz", ".pt", ".pth", ".safetensors", ".parquet")
"""How the names of feature files end."""
# Files that hold embeddings in other forms, and the line that makes one that is read.
_WAYS = {
    ".h5ad": "np.save('x.npy', anndata.read_h5ad({0!r}).obsm['X_pca'])",
    ".csv": "pandas.read_csv({0!r}).to_parquet('x.parquet')",
    ".feather": "pandas.read_feather({0!r}).to_parquet('x.parquet')",
    ".h5": "np.save('x.npy', h5py.File({0!r})['NAME'][:])",
    ".hdf5": "np.save('x.npy', h5py.File({0!r})['NAME'][:])",
    ".mtx": "np.save('x.npy', scipy.io.mmread({0!r}).toarray())",
    ".pkl": "np.save('x.npy', array), where you trust the file enough to load it",
}

LAUNCHERS = {  # how many were started -> which of them this is
    "WORLD_SIZE": "RANK",  # torchrun, accelerate
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",  # mpirun of Open MPI
    "PMI_SIZE": "PMI_RANK",  # mpiexec of MPICH and Intel MPI
    # srun. SLURM_NTASKS is what a job was granted: its batch script, one process, has it as well.
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}


def home_resolved(name: str) -> Path:
    """The path with its `~` resolved; as it is where no such user is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def dataset_path(name: str) -> Path:
    """The folder of images or the feature file that a name means, which is no name of `DATASETS`.

    Raises:
        DatasetUnavailable: nothing is there, or a file of another kind; says what is read.
    """
    path = home_resolved(name)
    ending = path.suffix.lower()
    if path.is_dir() or (ending in FEATURE_FILES and path.is_file()):
        return path
    if ending in _WAYS and path.is_file():
        way = _WAYS[ending].format(str(path))
        raise DatasetUnavailable(f"{printable(name)} is not read as it is; in Python: {way}")
    close = difflib.get_close_matches(name, DATASETS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise DatasetUnavailable(
        f"{name!r} is neither a data set by name ({', '.join(DATASETS)}), nor a folder, nor a "
        f"feature file ({' '.join(FEATURE_FILES)}){hint}"
    )


def check_dataset(name: str | None) -> None:
    """Raise DatasetUnavailable where neither a data set of that name nor its path is there."""
    if name is not None and name not in DATASETS:
        dataset_path(name)


def run_to_extend(name: str, runs: str) -> Path:
    """The folder of the run that EXTEND names: a path, or a name under RUNS_DIR.

    Raises:
        RunFolderError: neither is a run's folder.
    """
    places = [home_resolved(name), Path(runs) / name]
    folder = next((place for place in places if (place / "config.json").is_file()), None)
    if folder is None:
        raise RunFolderError(
            f"EXTEND is {name!r}, but neither {places[0]} nor {places[1]} is a run's folder "
            "(no config.json): name a finished run"
        )
    return folder


def check_run_name(path: Path, resume: bool) -> None:
    """Refuse a run's folder that is not there to be resumed, or is there before it begins.

    Raises:
        RunFolderError: says what is there, and the ways on.
    """
    if resume:
        if not (path / "config.json").exists():
            raise RunFolderError(f"{path} holds no run to resume")
    elif path.exists() and (
        not path.is_dir() or {file.name for file in path.iterdir()} - {".lock"}
    ):
        finished = (path / "metrics.json").exists()
        what = "a finished run" if finished else "an unfinished run or something else"
        raise RunFolderError(
            f"{path} already holds {what}: choose another --run_name, remove the folder, or go on "
            "with an unfinished run by --resume"
        )


def run_folder(name: str | Path) -> Path:
    """The folder of a run.

    Raises:
        RunFolderError: there is none, or it is no run's.
    """
    path = home_resolved(str(name))
    if not (path / "config.json").is_file():
        raise RunFolderError(
            f"{path} is not a run's folder (no config.json): give one, as runs/latest"
        )
    return path


def launched_as(environment: Mapping[str, str]) -> tuple[int, int, str] | None:
    """Which process this is, of how many that were started together, and the variables that say so.

    Args:
        environment: the process's own.

    Returns:
        Rank, count and the two variables in words; None for a process that was started alone.
    """
    for size, rank in LAUNCHERS.items():
        count, place = environment.get(size, ""), environment.get(rank, "")
        if count.isdecimal() and int(count) > 1 and place.isdecimal():
            return int(place), int(count), f"{rank} and {size}"
    return None
