"""A finished clustering run as a Python object: look at it, decide, curate, export."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from PIL import Image

from ssl_kd.errors import InputError
from ssl_kd.report.gallery import thumbnail
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench import curate
from ssl_kd.workbench.curate import Duplicates, Ranked
from ssl_kd.workbench.curate.image_checks import ImageChecks
from ssl_kd.workbench.decisions import Curation
from ssl_kd.workbench.explore import serve, write_site
from ssl_kd.workbench.export import export
from ssl_kd.workbench.export.cards import push_run
from ssl_kd.workbench.export.content import Content
from ssl_kd.workbench.naming import Names, name_samples

TYPICAL = 8  # default number of samples that represent a cluster
SHOWN = 30  # clusters in a notebook
_STYLES = {"tiny": "height: 40px; image-rendering: pixelated", "photo": "height: 40px"}


@dataclass(frozen=True, eq=False)
class Cluster:
    """One cluster of a run after all decisions.

    Attributes:
        number: its number.
        name: its name; empty if it has none.
        rows: numbers of its samples within the run `[size]`.
        confidence: their mean confidence.
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
        """Return its k samples with the highest confidence, or all if it has fewer."""
        confidence = self.run.samples.column("confidence")[self.rows]
        return self.rows[np.argsort(-confidence, kind="stable")[:k]]

    def images(self, k: int = TYPICAL) -> list[Image.Image]:
        """Return the pictures of the typical samples; none if the run has only features."""
        images = [self.run.samples.image(int(row)) for row in self.typical(k)]
        return [image for image in images if image is not None]


class Run:
    """A finished clustering run.

    Samples are numbered from 0 across all splits. Decisions are written to `curation.jsonl` in the
    run's folder; its other files stay unchanged.

    Args:
        samples: the run.

    Attributes:
        samples: table, embeddings, neighbors and pictures of the run.
        curation: decisions of people: `rename`, `merge`, `split`, `move`, `exclude`, `undo`.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples, self.curation = samples, Curation(samples)

    @classmethod
    def open(cls, path: str | Path = "runs/latest") -> Run:
        """Open a run's folder.

        Raises:
            RunFolderError: it is not a finished clustering run.
            CorruptFileError: one of its files is damaged or was edited.
        """
        return cls(Samples(path))

    @property
    def path(self) -> Path:
        """The folder."""
        return self.samples.path

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        n_clusters = len(self.curation.sizes)
        return f"Run({str(self.path)!r}, {len(self):,} samples, {n_clusters} clusters)"

    def _repr_html_(self) -> str:
        clusters = self.clusters
        more = len(clusters) - SHOWN
        rest = f"<p>and {more} more: <code>run.clusters</code></p>" if more > 0 else ""
        return f"<p>{html.escape(repr(self))}</p>{_table(clusters[:SHOWN])}{rest}"

    @property
    def scores(self) -> list[dict[str, Any]]:
        """Scores against known labels: a row for each method and split."""
        return self.samples.metrics["table"]

    @property
    def clusters(self) -> list[Cluster]:
        """All clusters that have a sample, by number."""
        clusters, names = self.curation.clusters, self.names.levels.get("cluster", {})
        order = np.argsort(clusters, kind="stable")
        numbers, first = np.unique(clusters[order], return_index=True)
        parts = dict(zip(numbers.tolist(), np.split(order, first[1:]), strict=True))
        confidence = self.samples.column("confidence")
        return [
            Cluster(
                self,
                number,
                names[number].text if number in names else "",
                rows,
                float(confidence[rows].mean()),
            )
            for number, rows in parts.items()
            if number >= 0
        ]

    def cluster(self, which: int | str) -> Cluster:
        """Return one cluster by its number or its name.

        Raises:
            InputError: there is none.
        """
        clusters = self.clusters
        for cluster in clusters:
            if which == (cluster.number if isinstance(which, int) else cluster.name or None):
                return cluster
        known = ", ".join(c.name or str(c.number) for c in clusters[:20])
        raise InputError(f"there is no cluster {which!r}; there are {known}")

    def frame(self) -> Any:
        """Return a pandas data frame with a row for each sample that is not excluded.

        `row` is its number; the columns of the file of assignments follow. `cluster` is the cluster
        after all decisions (`cluster_of_run` the original one, where any differs), and each level
        is followed by the names of its clusters, as `cluster_name`.
        """
        content = Content.of(self.samples)
        table = arrow.Table.from_batches(content.batches(max(len(content), 1)))
        return table.add_column(0, "row", arrow.array(content.rows)).to_pandas()

    def duplicates(self, split: str = "train", *, floor: float | None = None) -> Duplicates:
        """Find exact and near copies in a split (`ssl_kd.workbench.curate.near_duplicates`)."""
        return curate.near_duplicates(self.samples.store(split), floor=floor)

    def leaks(
        self, train: str = "train", test: str = "test", threshold: float | None = None
    ) -> Ranked:
        """Find samples of the split `test` that are copies of samples of the split `train`."""
        return curate.leaks(self.samples.store(train), self.samples.store(test), threshold)

    def outliers(self, split: str = "train") -> Ranked:
        """Rank the samples of a split by the run's outlier score, the furthest first.

        It measures whether a sample fits the training data. `ssl_kd.workbench.curate.outliers` of
        `samples.store(split)` finds more foreign samples within a split (docs/curate.md).
        """
        scores = self.samples.column("outlier", split)
        names = self.samples.column("file", split).tolist()
        return Ranked(names, np.arange(len(scores)), scores)

    def mislabelled(self, split: str = "train") -> Ranked:
        """Rank the labelled samples of a split (`ssl_kd.workbench.curate.mislabelled`)."""
        clusters = self.samples.column("cluster", split)
        return curate.mislabelled(self.samples.store(split), clusters=clusters)

    def odd_images(
        self, split: str = "train", *, progress: Callable[[int, int], None] | None = None
    ) -> ImageChecks:
        """Find broken, blank and tiny images of a split (`ssl_kd.workbench.curate.odd_images`)."""
        samples = self.samples
        ids, rows = samples.column("file", split).tolist(), samples.splits[split]
        return curate.odd_images(
            ids, lambda row: samples.image(rows.start + row), progress=progress
        )

    def explore(self, folder: str | Path | None = None, *, port: int = 0) -> Path | None:
        """Show the map of all samples in a browser.

        Args:
            folder: write a page to look at there, for any web server, and return its path; None:
                serve a page on this machine until Ctrl-C, in which clusters can be edited.
            port: of the local server; 0: any that is free.
        """
        if folder is not None:
            return write_site(self.samples, folder)
        return serve(self.samples, port)

    @property
    def names(self) -> Names:
        """Names of the clusters of every level; renamed ones take precedence."""
        return Names.load(self.path).edited({"cluster": self.curation.names})

    def name(self, captions: str | Path | Sequence[str] | None = None) -> Names:
        """Write `names.json` in the run's folder (`ssl_kd.workbench.naming.name_samples`)."""
        name_samples(self.samples, captions).save(self.path)
        return self.names

    def export(
        self,
        to: str = "parquet",
        out: str | Path | None = None,
        *,
        splits: Sequence[str] = (),
        clusters: Sequence[int] = (),
        columns: Mapping[str, NDArray[Any]] | None = None,
        **options: Any,
    ) -> Path:
        """Write the run in another program's format; return the path.

        `splits`, `clusters` and `columns` are arguments of `export.content.Content.of`, the others
        of `ssl_kd.workbench.export.export`.
        """
        content = Content.of(self.samples, splits=splits, clusters=clusters, columns=columns)
        return export(content, to, out, **options)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None
    ) -> str:
        """Upload the model with its card to the Hugging Face Hub; return its address."""
        return push_run(self.samples, repo_id, private=private, token=token)


def _table(clusters: Sequence[Cluster]) -> str:
    """Return an HTML table of clusters with typical pictures."""
    rows = []
    for cluster in clusters:
        try:
            images = [thumbnail(image) for image in cluster.images()]
        except (OSError, ValueError):  # pictures are missing; the numbers are still shown
            images = []
        pictures = "".join(
            f'<img src="{image["source"]}" style="{_STYLES[image["kind"]]}">' for image in images
        )
        cells = [cluster.number, html.escape(cluster.name), f"{len(cluster):,}"]
        cells += [f"{cluster.confidence:.2f}", pictures]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    head = "".join(f"<th>{name}</th>" for name in ("cluster", "name", "size", "confidence", ""))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
