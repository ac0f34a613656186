"""Select the samples of a run to export, with their clusters, names and further columns."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from typing_extensions import Self

from ssl_kd.datasets import UnreadableImage
from ssl_kd.errors import InputError, printable
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.decisions import Curation
from ssl_kd.workbench.naming import Names

logger = logging.getLogger(__name__)

SHOWN = 3  # number of missing pictures that a message names
RECORDS = 4096  # rows that are converted to Python objects at once


@dataclass(frozen=True)
class Content:
    """A selection of a run's samples to export, in the order of the run.

    Args:
        samples: all samples of the run.
        rows: row numbers of the exported samples `[m]`, ascending.
        clusters: cluster of every sample of the run after all decisions `[n]`; -1 for no cluster.
        names: names of the clusters.
        columns: columns to add: name -> value for every sample of the run `[n]`.
    """

    samples: Samples
    rows: NDArray[np.int64]
    clusters: NDArray[np.int64]
    names: Names = field(default_factory=Names)
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        samples: Samples,
        *,
        splits: Sequence[str] = (),
        clusters: Sequence[int] = (),
        names: Names | None = None,
        columns: Mapping[str, NDArray[Any]] | None = None,
    ) -> Self:
        """Select samples of a run; the decisions in its `curation.jsonl` are applied first.

        Args:
            samples: all samples of the run.
            splits: splits to export; empty for all.
            clusters: numbers of the clusters to export, after all decisions; empty for all.
            names: names of the clusters; None reads the run's `names.json`. Names in
                `curation.jsonl` take precedence.
            columns: columns to add: name -> value for every sample of the run `[n]`.

        Raises:
            InputError: a split or cluster does not exist, no sample is selected, or an added column
                has a wrong length or the name of an existing column.
            CorruptFileError: a file of the run is damaged.
        """
        curation = Curation(samples)
        after = curation.clusters
        rows = np.flatnonzero(~curation.excluded)
        if unknown := [name for name in splits if name not in samples.splits]:
            raise InputError(
                f"{samples.path} has no split {unknown[0]!r}; expected {', '.join(samples.splits)}"
            )
        if splits:
            rows = rows[np.isin(samples.column("split")[rows].astype(str), splits)]
        if unknown := [c for c in clusters if not (after == c).any()]:
            known = ", ".join(str(c) for c in np.unique(after)[:20])
            raise InputError(f"{samples.path} has no cluster {unknown[0]}; expected one of {known}")
        if clusters:
            rows = rows[np.isin(after[rows], clusters)]
        if not len(rows):
            raise InputError(
                f"no sample of {samples.path} is in the selected splits and clusters: select more "
                "of them"
            )
        names = Names.load(samples.path) if names is None else names
        names = names.edited({"cluster": curation.names})
        return cls(samples, rows, after, names, _checked(samples, columns or {}))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def title(self) -> str:
        """The name of the run, which is the name of its folder."""
        return self.samples.path.resolve().name

    def cluster_names(self) -> dict[int, str]:
        """Return number -> name (or number as text) of each exported cluster; -1 is `none`."""
        clusters = np.unique(self.clusters[self.rows]).tolist()
        return {c: "none" if c < 0 else self.names.of("cluster", c) for c in clusters}

    def batches(self, size: int) -> Iterator[arrow.RecordBatch]:
        """Yield the exported samples with all columns, in batches of `size` rows."""
        for start in range(0, len(self.rows), size):
            yield self._batch(self.rows[start : start + size])

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield each exported sample as a dict of its columns."""
        for batch in self.batches(RECORDS):
            yield from batch.to_pylist()

    def _batch(self, rows: NDArray[np.int64]) -> arrow.RecordBatch:
        table = self.samples.table.take(arrow.array(rows))
        columns: dict[str, Any] = {}
        for name in table.column_names:
            columns[name] = table.column(name).combine_chunks()
            if name == "cluster":
                columns[name] = arrow.array(self.clusters[rows], arrow.int32())
            if name in self.samples.levels:
                numbers = self.clusters[rows] if name == "cluster" else columns[name].to_numpy()
                texts = self.names.column(name, numbers)
                texts[numbers < 0] = None
                columns[f"{name}_name"] = arrow.array(texts.tolist(), arrow.string())
        if (self.samples.column("cluster") != self.clusters).any():
            columns["cluster_of_run"] = table.column("cluster").combine_chunks()
        for name, values in self.columns.items():
            chosen = values[rows]
            columns[name] = arrow.array(chosen.tolist() if chosen.dtype == object else chosen)
        return arrow.RecordBatch.from_pydict(columns)

    def with_pictures(self, *, skip_missing: bool = False) -> tuple[Content, list[Path]]:
        """Return the samples whose picture exists, and the absolute path of each picture.

        Args:
            skip_missing: leave out samples without a picture, and log a warning, instead of
                raising.

        Raises:
            InputError: pictures are missing, or the samples are not picture files.
        """
        rows, files, missing = [], [], []
        for row in self.rows.tolist():
            try:
                path = self.samples.image_file(row)
            except (FileNotFoundError, UnreadableImage):
                missing.append(row)
                continue
            if path is None:
                raise InputError(
                    f"the samples of {self.samples.path} are not picture files but features, or "
                    "records of one file: export them with --to parquet"
                )
            if path.is_file():
                rows.append(row)
                files.append(Path(path).absolute())
            else:
                missing.append(row)
        if missing:
            names = self.samples.column("file")
            shown = ", ".join(printable(str(names[row])) for row in missing[:SHOWN])
            message = f"{len(missing)} of {len(self)} pictures are missing: {shown}"
            message += ", ..." if len(missing) > SHOWN else ""
            if not skip_missing or not files:
                raise InputError(f"{message}. Put them back, or skip them with --skip_missing")
            logger.warning("%s; these samples are not exported", message)
        return replace(self, rows=np.array(rows, dtype=np.int64)), files


def refuse_columns(columns: Iterable[str], taken: Collection[str], owner: str) -> None:
    """Raise InputError if a column to add has a name in `taken`."""
    if both := [name for name in columns if name in taken]:
        raise InputError(f"{owner} has a column {both[0]!r} already: rename the column to add")


def _checked(samples: Samples, columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    level_names = [f"{level}_name" for level in samples.levels]
    taken = [*samples.table.column_names, *level_names, "cluster_of_run"]
    refuse_columns(columns, taken, "the run")
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    for name, values in arrays.items():
        if values.shape != (len(samples),):
            raise InputError(
                f"the column {name!r} has shape {list(values.shape)}; expected [{len(samples)}], "
                f"one value for each sample of {samples.path}"
            )
    return arrays
