"""A finished clustering run as a Python object: look, decide, curate, take a selection with you."""

from __future__ import annotations

import html
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from PIL import Image

from ssl_kd.errors import InputError, MissingPackage
from ssl_kd.finished import Samples
from ssl_kd.finished.curation import Curation
from ssl_kd.report.gallery import thumbnail

__all__ = ["Cluster", "Run"]

TYPICAL = 8  # samples that stand for a cluster
SHOWN = 30  # clusters in a notebook
_STYLE = "image-rendering: pixelated; height: 40px; margin: 1px"
Kind = Literal["pandas", "polars", "arrow"]


@dataclass(frozen=True)
class Cluster:
    """One cluster of a run, as it is after all decisions.

    Attributes:
        number: its number.
        name: what it is called; empty where nobody named it.
        rows: its samples `[size]`, numbers within the run.
        confidence: mean confidence of these.
    """

    run: Run
    number: int
    name: str
    rows: NDArray[np.int64]
    confidence: float

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"Cluster({self.number}{name}, {len(self):,} samples)"

    def _repr_html_(self) -> str:
        return _table([self])

    def typical(self, k: int = TYPICAL) -> NDArray[np.int64]:
        """The samples that it is surest of, at most k, the surest first."""
        confidence = self.run.samples.column("confidence")[self.rows]
        return self.rows[np.argsort(-confidence, kind="stable")[:k]]

    def images(self, k: int = TYPICAL) -> list[Image.Image]:
        """The pictures of the typical samples; none where the run learned from features."""
        found = [self.run.samples.image(int(row)) for row in self.typical(k)]
        return [image for image in found if image is not None]


class Run:
    """A finished clustering run.

    Samples are numbered from 0 through all splits. The run's own files are never changed; what is
    decided is kept in `curation.jsonl` beside them.

    Args:
        samples: the run.

    Attributes:
        samples: what the run left: its table, embeddings, neighbours and pictures.
        curation: what people decided: `rename`, `merge`, `split`, `move`, `exclude`, `undo`.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples, self.curation = samples, Curation(samples)

    @classmethod
    def open(cls, path: str | Path = "runs/latest") -> Run:
        """Open a run's folder.

        Raises:
            RunFolderError: no run, one that is not finished, or one of language models.
            CorruptFileError: a file of it is damaged or was edited.
        """
        return cls(Samples(path))

    @property
    def path(self) -> Path:
        """The folder."""
        return self.samples.path

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {len(self):,} samples, {len(self.clusters)} clusters)"

    def _repr_html_(self) -> str:
        clusters = self.clusters
        more = len(clusters) - SHOWN
        rest = f"<p>and {more} more: <code>run.clusters</code></p>" if more > 0 else ""
        return f"<p>{html.escape(repr(self))}</p>{_table(clusters[:SHOWN])}{rest}"

    # --- Look -------------------------------------------------------------------------------------

    @property
    def scores(self) -> list[dict[str, Any]]:
        """How good the answer is, where labels are known: a row for each answer and split."""
        return self.samples.metrics["table"]

    @property
    def clusters(self) -> list[Cluster]:
        """All clusters that have a sample, by number."""
        found, names = self.curation.clusters, self.curation.names
        order = np.argsort(found, kind="stable")
        numbers, first = np.unique(found[order], return_index=True)
        parts = dict(zip(numbers.tolist(), np.split(order, first[1:]), strict=True))
        confidence = self.samples.column("confidence")
        return [
            Cluster(self, number, names.get(number, ""), rows, float(confidence[rows].mean()))
            for number, rows in parts.items()
            if number >= 0
        ]

    def cluster(self, which: int | str) -> Cluster:
        """One cluster, by its number or its name.

        Raises:
            InputError: there is none, or several have the name.
        """
        clusters = self.clusters
        found = [c for c in clusters if which == (c.name if isinstance(which, str) else c.number)]
        if len(found) == 1:
            return found[0]
        known = ", ".join(c.name or str(c.number) for c in clusters[:20])
        how = "several clusters are" if found else "no cluster is"
        raise InputError(f"{how} called {which!r}; there are {known}: give a number")

    def typical(self, k: int = TYPICAL) -> dict[int, NDArray[np.int64]]:
        """The surest samples of each cluster, at most k."""
        return {cluster.number: cluster.typical(k) for cluster in self.clusters}

    def image(self, row: int) -> Image.Image | None:
        """The picture of a sample; None where the run learned from features."""
        return self.samples.image(row)

    def frame(self, kind: Kind = "pandas") -> Any:
        """A row for each sample, as a data frame.

        The columns of the file of assignments; `cluster` and `name` as they are after all
        decisions, and the run's own answer as `found`.

        Args:
            kind: `pandas`, `polars` or `arrow`.

        Raises:
            MissingPackage: it is not installed.
        """
        table, found = self.samples.table, self.curation.clusters
        names = np.array([self.curation.names.get(k, "") for k in range(int(found.max()) + 2)])
        at = table.column_names.index("cluster")
        table = table.append_column("found", table.column("cluster"))
        table = table.set_column(at, "cluster", arrow.array(found))
        table = table.add_column(at + 1, "name", arrow.array(names[found].tolist()))
        if kind == "arrow":
            return table
        if kind not in ("pandas", "polars"):
            raise InputError(f"kind is {kind!r}; expected pandas, polars or arrow")
        try:
            package = importlib.import_module(kind)
        except ImportError as error:
            raise MissingPackage(f"a frame of {kind} needs it: pip install {kind}") from error
        return package.from_arrow(table) if kind == "polars" else table.to_pandas()


def _table(clusters: Sequence[Cluster]) -> str:
    """Clusters with their typical pictures, for a notebook."""
    rows = []
    for cluster in clusters:
        try:
            shown = [thumbnail(image)["source"] for image in cluster.images()]
        except (OSError, ValueError):  # the pictures may be gone by now; the numbers still stand
            shown = []
        pictures = "".join(f'<img src="{source}" style="{_STYLE}">' for source in shown)
        cells = [cluster.number, html.escape(cluster.name), f"{len(cluster):,}"]
        cells += [f"{cluster.confidence:.2f}", pictures]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    head = "".join(f"<th>{name}</th>" for name in ("cluster", "name", "size", "confidence", ""))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
