"""A finished clustering run as a Python object: look, decide, curate, take a selection with you."""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as arrow
from numpy.typing import NDArray
from PIL import Image

from ssl_kd.errors import InputError, MissingPackage
from ssl_kd.report.gallery import thumbnail
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.curate import (
    Duplicates,
    Leaks,
    Ranked,
    label_next,
    leaks,
    mislabelled,
    near_duplicates,
)
from ssl_kd.workbench.curate.pictures import Pictures, odd_images
from ssl_kd.workbench.explore import serve, write_site
from ssl_kd.workbench.export import Content, export, push_run
from ssl_kd.workbench.finished import Curation, name_samples
from ssl_kd.workbench.naming import Names

TYPICAL = 8  # samples that stand for a cluster
SHOWN = 30  # clusters in a notebook
_STYLES = {"tiny": "height: 40px; image-rendering: pixelated", "photo": "height: 40px"}
Kind = Literal["pandas", "polars", "arrow"]


@dataclass(frozen=True, eq=False)
class Cluster:
    """One cluster of a run, as it is after all decisions.

    Attributes:
        number: its number.
        name: its name; empty if it has none.
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
        found = len(self.curation.sizes)
        return f"Run({str(self.path)!r}, {len(self):,} samples, {found} clusters)"

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
        found, names = self.curation.clusters, self.names.levels.get("cluster", {})
        order = np.argsort(found, kind="stable")
        numbers, first = np.unique(found[order], return_index=True)
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
        """One cluster, by its number or its name.

        Raises:
            InputError: there is none.
        """
        clusters = self.clusters
        for cluster in clusters:
            if which == (cluster.number if isinstance(which, int) else cluster.name or None):
                return cluster
        known = ", ".join(c.name or str(c.number) for c in clusters[:20])
        raise InputError(f"no cluster is called {which!r}; there are {known}")

    def typical(self, k: int = TYPICAL) -> dict[int, NDArray[np.int64]]:
        """The surest samples of each cluster, at most k."""
        return {cluster.number: cluster.typical(k) for cluster in self.clusters}

    def image(self, row: int) -> Image.Image | None:
        """The picture of a sample; None where the run learned from features."""
        return self.samples.image(row)

    def frame(self, kind: Kind = "pandas") -> Any:
        """A row for each sample that is not excluded, as a data frame.

        `row` is its number; the columns of the file of assignments follow. `cluster` is as it is
        after all decisions (`cluster_of_run` where that is another), and each level has the names
        of its clusters beside it, as `cluster_name`.

        Args:
            kind: `pandas`, `polars` or `arrow`.

        Raises:
            InputError: another kind; MissingPackage: it is not installed.
        """
        if kind not in get_args(Kind):
            raise InputError(f"kind is {kind!r}; expected one of {', '.join(get_args(Kind))}")
        content = Content.of(self.samples)
        table = arrow.Table.from_batches(content.batches(max(len(content), 1)))
        table = table.add_column(0, "row", arrow.array(content.rows))
        if kind == "arrow":
            return table
        try:
            package = importlib.import_module(kind)
        except ImportError as error:
            raise MissingPackage(f"a frame of {kind} needs it: pip install {kind}") from error
        return package.from_arrow(table) if kind == "polars" else table.to_pandas()

    # --- Curate -----------------------------------------------------------------------------------

    def duplicates(self, split: str = "train", *, floor: float | None = None) -> Duplicates:
        """Exact and near copies in one split, found once: `.groups(threshold)`, `.kept(...)`.

        Args:
            split: of the run; rows are numbered within it.
            floor: cosine down to which pairs are kept, as for
                `ssl_kd.workbench.curate.near_duplicates`.
        """
        return near_duplicates(self.samples.store(split), floor=floor)

    def leaks(self, train: str = "train", test: str = "test") -> Leaks:
        """Samples of one split that may be copies of samples of another: `.above(threshold)`."""
        return leaks(self.samples.store(train), self.samples.store(test))

    def outliers(self, split: str = "train") -> Ranked:
        """The samples of a split by the run's own outlier score, the furthest out first.

        It asks whether a sample fits into what was trained on. `ssl_kd.workbench.curate.outliers`
        of the split's `samples.store` finds more of what has strayed into a set (docs/curate.md).
        """
        scores = self.samples.column("outlier", split)
        names = self.samples.column("file", split).tolist()
        return Ranked(names, np.arange(len(scores)), scores)

    def mislabelled(self, split: str = "train") -> Ranked:
        """The labelled samples of a split by how little neighbours and clusters support the label.

        Raises:
            InputError: fewer than two classes are known.
        """
        clusters = self.samples.column("cluster", split)
        return mislabelled(self.samples.store(split), clusters=clusters)

    def odd_images(
        self, split: str = "train", *, progress: Callable[[int, int], None] | None = None
    ) -> Pictures:
        """The images of a split that are broken, blank or tiny; each is decoded once.

        Args:
            split: of the run; rows are numbered within it.
            progress: called with (images done, n).

        Raises:
            InputError: the run learned from features; FileNotFoundError: an image is gone.
        """
        samples = self.samples
        ids, rows = samples.column("file", split).tolist(), samples.splits[split]
        return odd_images(ids, lambda row: samples.image(rows.start + row), progress=progress)

    def label_next(self, n: int = 100, split: str = "train") -> Ranked:
        """The samples of a split to label next: many others of their part of the tree are alike.

        Args:
            n: how many.
            split: of the run; rows are numbered within it.

        Raises:
            InputError: there are fewer.
        """
        return label_next(self.samples.store(split), n, parents=self.samples.parents(n, split))

    def explore(self, folder: str | Path | None = None, *, port: int = 0) -> Path | None:
        """The map of all samples in a browser, where clusters are named, merged and split.

        Args:
            folder: write `explore.html` with its data there, for any web server, and return it;
                None: serve it to this machine until Ctrl-C.
            port: where it is served; 0: any that is free.
        """
        if folder is not None:
            return write_site(self.samples, folder)
        return serve(self.samples, port)

    # --- Name, and take with you ------------------------------------------------------------------

    @property
    def names(self) -> Names:
        """Of the clusters of every level; what people called one stands above what was found."""
        return Names.load(self.path).edited({"cluster": self.curation.names})

    def name(
        self,
        captions: str | Path | Sequence[str] | None = None,
        *,
        describe: Callable[[list[str]], str] | None = None,
    ) -> Names:
        """Name the clusters of every level, and keep that in `names.json` of the run.

        Args:
            captions: a table of captions, or a text of each sample; None: the words of file names.
            describe: texts of a cluster -> its name, by a language model of yours.

        Raises:
            InputError, FileNotFoundError: as `ssl_kd.workbench.finished.name_samples`.
        """
        name_samples(self.samples, captions, describe=describe).save(self.path)
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
        """Write the run, or a part of it, in another program's format; where it lies.

        Args:
            to: one of `ssl_kd.workbench.export.FORMATS`.
            out: where; None: `export/` in the run's folder. Nothing is overwritten.
            splits: those that go out; none named: all.
            clusters: those that go out; none named: all.
            columns: more of all samples, `[n]` each: `duplicate_group`; `x` and `y` are a map.
            **options: of the format.

        Raises:
            InputError: no such format, option, split or cluster, or something is at `out`.
        """
        content = Content.of(self.samples, splits=splits, clusters=clusters, columns=columns)
        return export(content, to, out, **options)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None
    ) -> str:
        """Put the model with its card on the Hugging Face hub."""
        return push_run(self.samples, repo_id, private=private, token=token)


def _table(clusters: Sequence[Cluster]) -> str:
    """Clusters with their typical pictures, for a notebook."""
    rows = []
    for cluster in clusters:
        try:
            shown = [thumbnail(image) for image in cluster.images()]
        except (OSError, ValueError):  # the pictures may be gone by now; the numbers still stand
            shown = []
        pictures = "".join(
            f'<img src="{image["source"]}" style="{_STYLES[image["kind"]]}">' for image in shown
        )
        cells = [cluster.number, html.escape(cluster.name), f"{len(cluster):,}"]
        cells += [f"{cluster.confidence:.2f}", pictures]
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    head = "".join(f"<th>{name}</th>" for name in ("cluster", "name", "size", "confidence", ""))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
