"""What of a run goes out: some of its samples, with everything that is known of them."""

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
from ssl_kd.workbench.finished import Curation
from ssl_kd.workbench.naming import Names

logger = logging.getLogger(__name__)

SHOWN = 3  # of those that are named in a message
RECORDS = 4096  # turned into objects at a time


@dataclass(frozen=True)
class Content:
    """Some samples of a run, in the order of the run.

    Args:
        samples: the run.
        rows: the numbers of the samples that go out, ascending, `[m]`.
        clusters: of all samples of the run, after what people decided, `[n]`; -1 is none.
        names: of the clusters.
        columns: more that is known of all samples, name -> `[n]`: `duplicate_group`, `x`, `y`.
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
        """What is asked for of a run, after the decisions in its `curation.jsonl`.

        Args:
            samples: the run.
            splits: those that go out; none named: all.
            clusters: those that go out, as they are after the decisions; none named: all.
            names: of the clusters; None: those of the run's `names.json`. What people called a
                cluster in `curation.jsonl` stands above either.
            columns: more of all samples, `[n]` each.

        Raises:
            InputError: a split or cluster that is not there, a column of another length or of a
                name that is taken, or nothing is left.
            CorruptFileError: of the run's files.
        """
        decided = Curation(samples)
        rows = np.flatnonzero(~decided.excluded)
        if unknown := [name for name in splits if name not in samples.splits]:
            raise InputError(
                f"{samples.path} has no split {unknown[0]!r}, only {', '.join(samples.splits)}"
            )
        if splits:
            runs = [np.arange(r.start, r.stop) for n, r in samples.splits.items() if n in splits]
            rows = np.intersect1d(rows, np.concatenate(runs))
        there = decided.clusters
        if unknown := [c for c in clusters if not (there == c).any()]:
            known = ", ".join(str(c) for c in np.unique(there)[:20])
            raise InputError(f"{samples.path} has no cluster {unknown[0]}, only {known}")
        if clusters:
            rows = rows[np.isin(there[rows], clusters)]
        if not len(rows):
            raise InputError(f"nothing of {samples.path} is left to export: ask for more")
        own = Names.load(samples.path) if names is None else names
        own = own.edited({"cluster": decided.names})
        return cls(samples, rows, there, own, _checked(samples, columns or {}))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def title(self) -> str:
        """What the run is called."""
        return self.samples.path.resolve().name

    def cluster_names(self) -> dict[int, str]:
        """The name, or the number, of every cluster that goes out; -1 is `none`."""
        found = np.unique(self.clusters[self.rows]).tolist()
        return {c: "none" if c < 0 else self.names.of("cluster", c) for c in found}

    def batches(self, size: int) -> Iterator[arrow.RecordBatch]:
        """The rows that go out, with all columns, `size` at a time."""
        for start in range(0, len(self.rows), size):
            yield self._batch(self.rows[start : start + size])

    def records(self) -> Iterator[dict[str, Any]]:
        """The rows that go out, as Python objects, one after the other."""
        for batch in self.batches(RECORDS):
            yield from batch.to_pylist()

    def _batch(self, rows: NDArray[np.int64]) -> arrow.RecordBatch:
        table = self.samples.table.take(arrow.array(rows))
        found: dict[str, Any] = {}
        for name in table.column_names:
            found[name] = table.column(name).combine_chunks()
            if name == "cluster":
                found[name] = arrow.array(self.clusters[rows], arrow.int32())
            if name in self.samples.levels:
                numbers = self.clusters[rows] if name == "cluster" else found[name].to_numpy()
                texts = self.names.column(name, numbers)
                texts[numbers < 0] = None
                found[f"{name}_name"] = arrow.array(texts.tolist(), arrow.string())
        if (self.samples.column("cluster") != self.clusters).any():
            found["cluster_of_run"] = table.column("cluster").combine_chunks()
        for name, values in self.columns.items():
            own = values[rows]
            found[name] = arrow.array(own.tolist() if own.dtype == object else own)
        return arrow.RecordBatch.from_pydict(found)

    def with_pictures(self, *, skip_missing: bool = False) -> tuple[Content, list[Path]]:
        """The rows whose pictures are there, and where.

        Args:
            skip_missing: leave out those that are gone, and say so.

        Raises:
            InputError: pictures are gone, all of them or some; or they are no files of their own.
        """
        samples, found, gone = self.samples, [], []
        for row in self.rows.tolist():
            try:
                path = samples.image_file(row)
            except (FileNotFoundError, UnreadableImage):
                gone.append(row)
                continue
            if path is None:
                raise InputError(
                    f"the samples of {samples.path} are no picture files of their own (they came "
                    "from a data set in one file, or as features): export them as parquet"
                )
            (found if path.is_file() else gone).append(row if not path.is_file() else (row, path))
        if gone:
            names = samples.column("file")
            shown = ", ".join(printable(str(names[row])) for row in gone[:SHOWN])
            what = f"{len(gone)} of {len(self)} pictures are gone: {shown}"
            what += ", ..." if len(gone) > SHOWN else ""
            if not skip_missing or not found:
                raise InputError(f"{what}. Put them back, or leave them out: --skip_missing")
            logger.warning("%s; left out", what)
        rows = np.array([row for row, _ in found], dtype=np.int64)
        return replace(self, rows=rows), [Path(path).absolute() for _, path in found]


def refuse_columns(columns: Iterable[str], taken: Collection[str], whose: str) -> None:
    """Raise InputError where a column that was given would take the place of another."""
    if both := [name for name in columns if name in taken]:
        raise InputError(f"{whose} has a column {both[0]!r} already: call yours otherwise")


def _checked(samples: Samples, columns: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    found = {}
    named = [f"{level}_name" for level in samples.levels]
    refuse_columns(columns, [*samples.table.column_names, *named, "cluster_of_run"], "the run")
    for name, values in columns.items():
        found[name] = np.asarray(values)
        if found[name].shape != (len(samples),):
            raise InputError(
                f"column {name!r} has shape {list(found[name].shape)}, expected "
                f"[{len(samples)}], a value for each sample of {samples.path}"
            )
    return found
