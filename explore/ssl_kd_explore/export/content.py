"""Select the samples of a run to export, with their clusters and names."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from typing_extensions import Self

from ssl_kd.core.errors import InputError, printable
from ssl_kd.vision.data import UnreadableImage
from ssl_kd.vision.data.tables import ROOT
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.sources import SourceChanged
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.decisions.curation import FILE
from ssl_kd_explore.metadata import metadata

logger = logging.getLogger(__name__)

SHOWN = 3  # number of missing pictures that a message names
RECORDS = 4096  # rows that are converted to Python objects at once


@dataclass(frozen=True)
class Content:
    """A selection of a run's samples to export, in the order of the run."""

    samples: Samples
    rows: NDArray[np.int64]  # row numbers of the exported samples [m], ascending
    clusters: NDArray[np.int64]  # of all samples of the run [n], after all decisions; -1: none
    names: Mapping[int, str] = field(default_factory=dict)  # given, or words of a cluster's texts
    checked: NDArray[np.bool_] | None = None  # of all samples [n]; None: nothing was checked
    decisions: str = ""  # lines of curation.jsonl

    @classmethod
    def of(
        cls, samples: Samples, *, splits: Sequence[str] = (), clusters: Sequence[int] = ()
    ) -> Self:
        """Select samples of a run by split and cluster after all decisions; by default all."""
        curation = Curation(samples)
        lines = [{k: v for k, v in line.items() if k != "undone"} for line in curation.lines]
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
        checked = curation.checked if curation.checked.any() else None
        decisions = "".join(json.dumps(line) + "\n" for line in lines)
        names = curation.words | curation.names
        return cls(samples, rows, after, names, checked, decisions)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def title(self) -> str:
        """The name of the run, which is the name of its folder."""
        return self.samples.path.resolve().name

    def cluster_names(self) -> dict[int, str]:
        """Return number -> name (or number as text) of each exported cluster."""
        clusters = np.unique(self.clusters[self.rows]).tolist()
        return {cluster: self.names.get(cluster, str(cluster)) for cluster in clusters}

    def write_decisions(self, folder: Path) -> None:
        """Write the decisions, if there are any, to `curation.jsonl` in a folder."""
        if self.decisions:
            (folder / FILE).write_text(self.decisions, encoding="utf-8")

    @property
    def table(self) -> arrow.Table:
        """The exported samples with all columns; `cluster` has the clusters after all decisions.

        Its metadata has the folder of relative paths in the column that shows the samples.
        """
        table, columns = self.samples.table, dict[str, Any]()
        for name in table.column_names:
            columns[name] = table.column(name)
            if name == "cluster":
                columns[name] = arrow.array(self.clusters, arrow.int32())
                names = [self.names.get(number, str(number)) for number in self.clusters.tolist()]
                columns["cluster_name"] = arrow.array(names, arrow.string())
        if (self.samples.column("cluster") != self.clusters).any():
            columns["cluster_of_run"] = table.column("cluster")
        if self.checked is not None:
            columns["checked"] = self.checked
        is_exported = np.isin(np.arange(len(self.samples)), self.rows)
        table = arrow.table(columns | metadata(self.samples)).filter(arrow.array(is_exported))
        root = self.samples.media_root
        return table if root is None else table.replace_schema_metadata({ROOT: os.fsencode(root)})

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield each exported sample as a dict of its columns."""
        for batch in self.table.to_batches(RECORDS):
            yield from batch.to_pylist()

    def with_pictures(self, *, skip_missing: bool = False) -> tuple[Content, list[Path]]:
        """Return the samples whose picture exists, and the absolute path of each picture.

        Pictures that are missing, or have changed since the run, raise InputError; with
        `skip_missing`, a warning lists them.
        """
        files: dict[int, Path] = {}
        changed: set[int] = set()
        for row in self.rows.tolist():
            with suppress(FileNotFoundError, UnreadableImage):
                try:
                    path = self.samples.image_file(row)
                except SourceChanged:
                    changed.add(row)
                    continue
                if path is None:
                    raise InputError(
                        f"the samples of {self.samples.path} are features or records in a single "
                        "file, not picture files: export them with --to parquet"
                    )
                if path.is_file():
                    files[row] = path.absolute()
        missing = [row for row in self.rows.tolist() if row not in files]
        if missing:
            names = self.samples.column("file")
            shown = ", ".join(printable(str(names[row])) for row in missing[:SHOWN])
            what = "have changed since the run" if changed.issuperset(missing) else "are missing"
            if changed and not changed.issuperset(missing):
                what = f"are missing or, {len(changed)} of them, have changed since the run"
            message = f"{len(missing)} of {len(self)} pictures {what}: {shown}"
            message += ", ..." if len(missing) > SHOWN else ""
            if not skip_missing or not files:
                raise InputError(f"{message}. Put them back, or skip them with --skip_missing")
            logger.warning("%s; these samples are not exported", message)
        return replace(self, rows=np.array(list(files), np.int64)), list(files.values())
