"""Read the run folder of a clustering run for its pages; a file that is missing counts as empty."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from pyarrow import compute

from ssl_kd.core.pages.run_files import RunFiles
from ssl_kd.vision.assignments import assignments_of
from ssl_kd.vision.samples import read_table


@dataclass(frozen=True)
class RunResults(RunFiles):
    """The files of one clustering run."""

    split: str  # the split that the page shows: the added samples of an extended run, else train
    assignments: arrow.Table  # the samples of `split`
    arrays: dict[str, NDArray]  # arrays.npz: map and typical samples

    @classmethod
    def read(cls, path: Path) -> "RunResults":
        """Read the files of a run folder; raise FileNotFoundError if there is no such folder."""
        files = RunFiles.read(path)
        arrays: dict[str, NDArray] = {}
        if (path / "arrays.npz").exists():
            with np.load(path / "arrays.npz", allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        split = files.metrics.get("extended", {}).get("split", "train")
        return cls(
            **vars(files), split=split, assignments=read_assignments(path, split), arrays=arrays
        )


def read_assignments(folder: Path, split: str) -> arrow.Table:
    """Read the samples of one split of a run; an empty table if the run has not written any."""
    path = assignments_of(folder)
    if not path.exists():
        return arrow.table({"cluster": arrow.array([], arrow.int64())})
    table = read_table(path, ["file", "confidence", "cluster", "label", "split"])
    return table.filter(compute.field("split") == split)
