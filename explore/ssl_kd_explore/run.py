"""Work with a finished clustering run from Python: inspect, curate and export clusters."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from PIL import Image

from ssl_kd.core.errors import InputError
from ssl_kd.vision.report.gallery import thumbnail
from ssl_kd.vision.run import run as train
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import AUTO, VisionSettings
from ssl_kd_explore import curate
from ssl_kd_explore.clustered import settings_of, write_frame
from ssl_kd_explore.columns import Columns, group_rows
from ssl_kd_explore.compare import compare_runs
from ssl_kd_explore.curate import Duplicates, Ranked, selection
from ssl_kd_explore.curate.image_checks import ImageChecks
from ssl_kd_explore.decisions import Curation
from ssl_kd_explore.explore import map_of, serve, write_site
from ssl_kd_explore.explore.map_image import map_image
from ssl_kd_explore.export import export
from ssl_kd_explore.export.content import Content
from ssl_kd_explore.selection_methods import METHODS

TYPICAL = 8  # default number of samples that represent a cluster
SHOWN = 30  # number of clusters that a notebook shows
_STYLES = {"tiny": "height: 40px; image-rendering: pixelated", "photo": "height: 40px"}


@dataclass(frozen=True, eq=False)
class Cluster:
    """A cluster of a run, after all decisions.

    Attributes:
        run: the run.
        number: number of the cluster.
        name: name of the cluster, or an empty string.
        rows: row numbers of its samples `[size]`.
        confidence: mean confidence of its samples.
        words: if it has no name and its samples are texts, the words that tell them apart.
    """

    run: Run
    number: int
    name: str
    rows: NDArray[np.int64]
    confidence: float
    words: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        called = self.name or self.words
        name = f" {called!r}" if called else ""
        return f"Cluster({self.number}{name}, {len(self):,} samples)"

    def _repr_html_(self) -> str:
        return _table([self])

    def typical(self, k: int = TYPICAL) -> NDArray[np.int64]:
        """Return the rows of the k samples with the highest confidence."""
        confidence = self.run.samples.column("confidence")[self.rows]
        return self.rows[np.argsort(-confidence, kind="stable")[:k]]

    def images(self, k: int = TYPICAL) -> list[Image.Image]:
        """Return the pictures of the k typical samples; empty if the run has no pictures."""
        images = [self.run.samples.image(int(row)) for row in self.typical(k)]
        return [image for image in images if image is not None]


class Run:
    """A finished clustering run: its clusters, scores, curation and exports.

    Samples are numbered from 0 across all splits.

    Args:
        samples: the samples of the run.

    Attributes:
        samples: table, embeddings and pictures of the samples.
        curation: renames, merges and splits clusters, moves and excludes samples, and undoes it.
            Decisions are written to `curation.jsonl` in the run's folder; no other file changes.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples, self.curation = samples, Curation(samples)

    @classmethod
    def open(cls, path: str | Path = "runs/latest") -> Run:
        """Open the folder of a finished run.

        Raises:
            RunFolderError: the folder does not hold a finished clustering run.
            CorruptFileError: a file of the run is damaged or was edited.
        """
        return cls(Samples(path))

    @classmethod
    def of(cls, data: Any, *, media: str | None = None, **settings: Any) -> Run:
        """Cluster embeddings or images, unless that was done before, and open the run.

        Args:
            data: path of a feature file or of a folder of images, or a data frame (pandas, polars
                or pyarrow) with a column of embeddings. A data frame is written to a Parquet file
                in `runs/explore-frames`.
            media: column that shows what a row is: texts, links, or paths of files; None: find one.
            **settings: settings of `train.py`, such as `column="clip"` for the column with the
                embeddings, or `n_clusters=20`, which is `auto` by default.

        Raises:
            InputError: the data or a setting is not valid.

        Example:
            `Run.of(frame, column="embedding", media="text").explore()`
        """
        chosen = VisionSettings(**{"n_clusters": AUTO, **settings})
        is_path = isinstance(data, (str, Path))
        path = str(data) if is_path else str(write_frame(data, chosen.runs_dir))
        chosen, folder = settings_of(path, chosen, media)
        if not (folder / "metrics.json").is_file():
            train(chosen)
        return cls(Samples(folder, media))

    @property
    def path(self) -> Path:
        """Path of the run's folder."""
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
        """Scores against known labels, one dict per method and split."""
        return self.samples.metrics["table"]

    @property
    def clusters(self) -> list[Cluster]:
        """All clusters that are not empty, sorted by number."""
        names, words = self.curation.names, self.curation.words
        confidence = self.samples.column("confidence")
        return [
            Cluster(
                self,
                number,
                names.get(number, ""),
                rows,
                float(confidence[rows].mean()),
                words.get(number, ""),
            )
            for number, rows in group_rows(self.curation.clusters, np.arange(len(self))).items()
        ]

    def cluster(self, which: int | str) -> Cluster:
        """Return the cluster with a given number or name.

        Raises:
            InputError: no cluster has this number or name.
        """
        clusters = self.clusters
        for cluster in clusters:
            if which == (cluster.number if isinstance(which, int) else cluster.name or None):
                return cluster
        known = ", ".join(c.name or str(c.number) for c in clusters[:20])
        raise InputError(f"there is no cluster {which!r}; expected one of {known}")

    def decisions(self) -> list[dict[str, Any]]:
        """Return the decisions that are in force, oldest first: those that no later one undoes.

        Each is a line of `curation.jsonl`; `ssl_kd_explore.decisions.schema()` describes it.
        """
        lines = [line for line in self.curation.lines if line["do"] != "undo"]
        return [line for line in lines if not line.pop("undone")]

    def find(
        self, filter: Mapping[str, str], sort: str | None = None, descending: bool = False
    ) -> NDArray[np.int64]:
        """Return the rows of the samples that pass all filters, as the explorer's table shows them.

        Args:
            filter: column -> text, as typed into a filter of the table: `cat` (contains, ignoring
                case), `=cat`, `!=cat`; for numbers `3`, `<0.5`, `<=`, `>`, `>=`, `0.2..0.5`. `=`
                alone finds missing values. `cluster` also takes a name or a part of it. The column
                `""` stands for all columns of texts.
            sort: column to sort by, missing values last; None keeps the order of the rows.
            descending: whether the largest value comes first.

        Raises:
            InputError: there is no such column, or a filter is not valid.
        """
        return self._columns.find(filter, sort, descending)

    @cached_property
    def _columns(self) -> Columns:
        return Columns(self.samples, self.curation)

    def frame(self) -> Any:
        """Return a pandas data frame with one row per sample that is not excluded.

        The first column, `row`, is the number of the sample; the columns of the assignments follow.
        `cluster` and `cluster_name` are the cluster and its name after all decisions. If decisions
        changed clusters, the original ones are in `cluster_of_run`. Integers and truth values with
        missing ones have pandas' nullable types.
        """
        content = Content.of(self.samples)
        table = content.table.add_column(0, "row", arrow.array(content.rows))
        frame = table.to_pandas()
        nullable = _nullable_types()
        for name in table.column_names:
            column = table.column(name)
            if column.null_count and column.type in nullable:
                frame[name] = column.to_pandas(types_mapper=nullable.get)
        return frame

    def duplicates(
        self,
        split: str = "train",
        *,
        floor: float | None = None,
        pictures: ImageChecks | None = None,
    ) -> Duplicates:
        """Find exact and near copies in a split (`curate.near_duplicates`).

        `pictures`, from `odd_images`, adds images that were shrunk or compressed again.
        """
        return curate.near_duplicates(self.samples.store(split), floor=floor, pictures=pictures)

    def leaks(
        self, train: str = "train", test: str = "test", threshold: float | None = None
    ) -> Ranked:
        """Find samples of one split (`test`) that are copies of samples of another (`train`)."""
        return curate.leaks(self.samples.store(train), self.samples.store(test), threshold)

    def outliers(self, split: str = "train") -> Ranked:
        """Rank the samples of a split by the run's outlier score, highest first.

        The score measures how unlike the training data a sample is. To find unusual samples within
        the training data, `ssl_kd_explore.curate.outliers(samples.store(split))` is better.
        """
        scores = self.samples.column("outlier", split)
        names = self.samples.column("file", split).tolist()
        return Ranked(names, np.arange(len(scores)), scores)

    def mislabeled(self, split: str = "train") -> Ranked:
        """Rank the samples of a split by how improbable their label is (`curate.mislabeled`)."""
        clusters = self.samples.column("cluster", split)
        return curate.mislabeled(self.samples.store(split), clusters=clusters)

    def odd_images(
        self, split: str = "train", *, progress: Callable[[int, int], None] | None = None
    ) -> ImageChecks:
        """Find damaged, blank and tiny images of a split (`curate.odd_images`)."""
        samples = self.samples
        ids, rows = samples.column("file", split).tolist(), samples.splits[split]
        return curate.odd_images(ids, lambda row: samples.image(rows.start + row), progress)

    def select(
        self,
        n: int,
        by: str = "typical",
        split: str = "train",
        *,
        near: str | None = None,
        start: Sequence[str] = (),
        seed: int = 0,
    ) -> arrow.Table:
        """Choose samples of a split to look at or to label; excluded ones are left out.

        Args:
            n: number of samples.
            by: `typical` (centers of n groups of similar samples, the largest group first),
                `diverse` (each is the one furthest from all before), `balanced` (equally many of
                each cluster, the most certain first) or `near` (the most similar to a sample).
            split: split to choose from.
            near: for `near`, the name of that sample, as in the column `file`.
            start: names of samples that were chosen before; the selection continues from them.
            seed: seed of `typical`.

        Returns:
            A table with the columns `row`, `file`, `cluster` and `score`, in the order of the
            choice. A score is the size of the group, the distance to those before, the confidence
            or the cosine.

        Raises:
            InputError: `by` or a name is not known, or fewer than n samples remain.
        """
        if by not in METHODS:
            raise InputError(f"by is {by!r}; expected one of {', '.join(METHODS)}")
        names = self.samples.column("file", split).tolist()
        clusters, allowed = self._clusters_of(split)
        earlier = _rows_of(names, start)
        options: dict[str, Any] = {"start": earlier, "allowed": allowed}
        if by == "balanced":
            confidence = self.samples.column("confidence", split)
            chosen = selection.balanced(clusters, confidence, n, **options)
        else:
            x = selection.directions(self.samples.store(split))
            if by == "typical":
                chosen = selection.typical(x, n, seed=seed, **options)
            elif by == "diverse":
                chosen = selection.diverse(x, n, **options)
            else:
                (query,) = _rows_of(names, [near or ""])
                chosen = selection.near(x, x[query], n, **options)
        return self._table_of(chosen.rows, names, clusters, split, score=chosen.scores)

    def held_out(self, share: float, split: str = "train", *, seed: int = 0) -> arrow.Table:
        """Choose a share of a split for validation, equally of all clusters.

        A sample and its copies (`duplicates`) are on the same side; excluded ones are on neither.

        Returns:
            A table of the samples to hold out, with the columns `row`, `file` and `cluster`.

        Raises:
            InputError: `share` is not between 0 and 1.
        """
        names = self.samples.column("file", split).tolist()
        clusters, allowed = self._clusters_of(split)
        groups = self.duplicates(split).groups()
        chosen = selection.held_out(groups, clusters, share, allowed=allowed, seed=seed)
        return self._table_of(np.flatnonzero(chosen), names, clusters, split)

    def _clusters_of(self, split: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the clusters of a split after all decisions, and the rows not excluded."""
        rows = self.samples.splits[split]
        part = slice(rows.start, rows.stop)
        clusters = np.asarray(self.curation.clusters[part], np.int64)
        return clusters, np.flatnonzero(~self.curation.excluded[part])

    def _table_of(
        self,
        rows: NDArray[np.int64],
        names: Sequence[str],
        clusters: NDArray[np.int64],
        split: str,
        **columns: NDArray[np.float64],
    ) -> arrow.Table:
        files = arrow.array([names[row] for row in rows.tolist()], arrow.string())
        about = {"row": rows + self.samples.splits[split].start, "file": files}
        return arrow.table({**about, "cluster": clusters[rows], **columns})

    def compare(self, other: Run) -> dict[str, Any]:
        """Compare the clusters with those of another run, on the files that both have.

        Returns:
            The numbers that `ssl_kd compare` writes: `agreement`, `splits` and `merges` of
            clusters, the largest `differences`, the `judgement` (how well both clusterings
            follow the neighbors that both runs share), and scores by `labels` if any are known.

        Raises:
            InputError: the runs have no file in common.
        """
        return compare_runs(self.samples, other.samples)

    def explore(self, folder: str | Path | None = None, *, port: int = 0) -> Path | None:
        """Show a map of all samples in a browser.

        Args:
            folder: write a static page to this new folder and return the path of the page. None
                serves a page on this machine until Ctrl-C; only a served page can edit clusters.
            port: port of the local server; 0 for any free port.
        """
        if folder is not None:
            return write_site(self.samples, folder)
        return serve(self.samples, port)

    def map_image(self, color: str = "cluster", width: int = 800) -> Image.Image:
        """Draw the map of all samples as a picture.

        Args:
            color: column that colors the samples, such as `cluster`, `label` or `confidence`.
            width: width and height in pixels, 64 to 4096.

        Raises:
            InputError: there is no such column, it has texts, or the width is out of range.
        """
        return map_image(map_of(self.samples), self._columns, color, width)

    def export(
        self,
        to: str = "parquet",
        out: str | Path | None = None,
        *,
        splits: Sequence[str] = (),
        clusters: Sequence[int] = (),
        **options: Any,
    ) -> Path:
        """Export the run in another program's format, and return the path of the output.

        Args:
            to: name of the format, such as `parquet`, `folders` or `fiftyone`.
            out: path of the output; None for a default name in the run's folder.
            splits: splits to export; empty for all.
            clusters: numbers of the clusters to export; empty for all.
            **options: `force`, and the options of the format (`ssl_kd_explore.export`).
        """
        content = Content.of(self.samples, splits=splits, clusters=clusters)
        return export(content, to, out, **options)


def _nullable_types() -> dict[arrow.DataType, Any]:
    """Return Arrow type -> type of pandas that keeps integers and truth values beside null."""
    import pandas

    types = {arrow.bool_(): pandas.BooleanDtype()}
    for name in ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64"):
        types[arrow.type_for_alias(name.lower())] = getattr(pandas, f"{name}Dtype")()
    return types


def _table(clusters: Sequence[Cluster]) -> str:
    """Return an HTML table of clusters, with their typical pictures."""
    rows = []
    for cluster in clusters:
        try:
            images = [thumbnail(image) for image in cluster.images()]
        except (OSError, ValueError):  # pictures are missing; the numbers are still shown
            images = []
        pictures = "".join(
            f'<img src="{image["source"]}" style="{_STYLES[image["kind"]]}">' for image in images
        )
        cells = [cluster.number, html.escape(cluster.name or cluster.words), f"{len(cluster):,}"]
        cells += [f"{cluster.confidence:.2f}", pictures]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    head = "".join(f"<th>{name}</th>" for name in ("cluster", "name", "size", "confidence", ""))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _rows_of(names: Sequence[str], wanted: Sequence[str]) -> list[int]:
    """Return the rows of samples with some names."""
    places = {name: row for row, name in enumerate(names)} if wanted else {}
    if missing := [name for name in wanted if name not in places]:
        raise InputError(
            f"there is no sample {missing[0]!r} in the split; expected a name as in its column "
            f"file, such as {names[0]!r}"
        )
    return [places[name] for name in wanted]
