"""Where the model sees the samples of a store, and the files that say it.

`assignments.csv`, or from a million rows on `assignments.parquet` with the same columns: numbers
are numbers there, and names an Arrow column.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as arrow
import torch
from numpy.typing import NDArray
from pyarrow import parquet

from ssl_kd.errors import RunFolderError
from ssl_kd.files import atomic_write
from ssl_kd.files.cells import csv_field
from ssl_kd.store import EmbeddingStore
from ssl_kd.vision.consensus import sample_rows
from ssl_kd.vision.model import ROWS_PER_BLOCK, ClusterModel, read_config, read_metrics
from ssl_kd.vision.novelty import without_outliers
from ssl_kd.vision.settings import AnswerSettings

TOP_K = 3  # clusters named for each sample, the likeliest first
JUDGED_ROWS = 100_000
CSV_ROWS = 1_000_000  # more are written as Parquet
ROWS_PER_GROUP = 131_072  # of a Parquet file
PLACES = ("second", "third")


class Assignments:
    """The samples of a store, where the model sees them, and those of them that are scored.

    What is kept of a row is 16 bytes, 8 for each of TOP_K and 4 for each level of the tree.

    Attributes:
        likely: `[n, TOP_K]` int32, the likeliest clusters, first the likeliest.
        probabilities: `[n, TOP_K]` float32, of these.
        clusters: `[n]` int32, the likeliest, or -1 beyond NOISE_THRESHOLD.
        confidence: `[n]`, of the likeliest.
        outlier: `[n]`, how far out each lies.
        sizes: clusters of each level of the tree, finest first; empty where there is none.
        levels: `[n, level]` int32, each sample's, or -1 beyond NOISE_THRESHOLD.
        all_labels: `[n]`, or None.
        rows: those that are scored, a random part of very many.
        x: `[row, dim]`, their embeddings.
        labels: `[row]`, or None.
    """

    def __init__(
        self, store: EmbeddingStore, settings: AnswerSettings, model: ClusterModel
    ) -> None:
        self.store, n = store, store.n
        self.sizes = model.options["levels"] or []
        most = min(TOP_K, model.n_clusters)
        clusters = torch.empty(n, most, dtype=torch.int32)
        probabilities, outlier = torch.empty(n, most), torch.empty(n)
        tree = torch.empty(n, len(self.sizes), dtype=torch.int32)
        for start, x in store.blocks(ROWS_PER_BLOCK):
            rows = slice(start, start + len(x))
            clusters[rows], probabilities[rows] = model.likeliest(x, most)
            outlier[rows] = model.outlier_scores(x)
            if self.sizes:
                tree[rows] = model.predict_levels(x, clusters[rows, 0].long()).int()
        self.likely, self.probabilities = clusters.numpy(), probabilities.numpy()
        self.outlier, self.confidence = outlier.numpy(), self.probabilities[:, 0]
        first = clusters[:, 0]
        if settings.noise_threshold is not None:
            first = without_outliers(first, outlier, settings.noise_threshold)
        self.clusters = first.numpy()
        self.levels = tree.masked_fill_(first.unsqueeze(1) < 0, -1).numpy()
        self.all_labels = None if store.labels is None else store.labels.numpy()

        # Heads and baselines are compared on the same rows, a sample where there are very many.
        self.rows = sample_rows(store.n, settings.seed, JUDGED_ROWS)
        self.x = store.gather(self.rows).numpy()
        self.labels = None if self.all_labels is None else self.all_labels[self.rows.numpy()]

    @property
    def members(self) -> NDArray[np.int32]:
        """The clusters of the samples that have one."""
        return self.clusters[self.clusters >= 0]

    def columns(self, labelled: bool) -> list[str]:
        """The names of the columns."""
        more = PLACES[: self.likely.shape[1] - 1]
        return [
            *("file", "cluster", "confidence", "split"),
            *(["label"] if labelled else []),
            "outlier",
            *(name for place in more for name in (place, f"{place}_confidence")),
            *(f"level_{size}" for size in self.sizes),
        ]

    def blocks(self, split: str, rows_per_block: int) -> Iterator[dict[str, Any]]:
        """The columns of some rows after the other: lists of text, arrays of numbers."""
        for start in range(0, self.store.n, rows_per_block):
            rows = slice(start, min(start + rows_per_block, self.store.n))
            size = rows.stop - rows.start
            block: dict[str, Any] = {
                "file": self.store.ids[rows],
                "cluster": self.clusters[rows],
                "confidence": self.confidence[rows],
                "split": [split] * size,
                "label": self._labels(rows),
                "outlier": self.outlier[rows],
            }
            for place, name in enumerate(PLACES[: self.likely.shape[1] - 1], 1):
                block[name] = self.likely[rows, place]
                block[f"{name}_confidence"] = self.probabilities[rows, place]
            for place, level in enumerate(self.sizes):
                block[f"level_{level}"] = self.levels[rows, place]
            yield block

    def lines(self, split: str, columns: Sequence[str]) -> Iterator[str]:
        """Lines of CSV, thousands at a time; a column not known stays empty."""
        for block in self.blocks(split, ROWS_PER_BLOCK):
            nothing = [""] * len(block["file"])
            shown = [_as_text(block.get(name, nothing)) for name in columns]
            yield "".join(",".join(row) + "\n" for row in zip(*shown, strict=True))

    def batches(self, split: str, schema: arrow.Schema) -> Iterator[arrow.RecordBatch]:
        """Groups of rows of Parquet; a column not known is null."""
        for block in self.blocks(split, ROWS_PER_GROUP):
            nothing = [None] * len(block["file"])
            arrays = [arrow.array(block.get(f.name, nothing), f.type) for f in schema]
            yield arrow.record_batch(arrays, schema=schema)

    def _labels(self, rows: slice) -> list[str]:
        if self.all_labels is None:
            return [""] * (rows.stop - rows.start)
        labels, names = self.all_labels[rows].tolist(), self.store.class_names
        return ["" if k < 0 else str(k) if names is None else names[k] for k in labels]


def _as_text(values: Any) -> list[str]:
    if isinstance(values, np.ndarray):
        shown = "{:.4f}" if values.dtype.kind == "f" else "{}"
        return [shown.format(value) for value in values.tolist()]
    return [csv_field(text) for text in values]


def assignments_of(folder: Path) -> Path:
    """The file of a run that says who is in which cluster; the CSV where there is none yet."""
    large = folder / "assignments.parquet"
    return large if large.is_file() else folder / "assignments.csv"


def read_finished(path: Path, *needed: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read `config.json` and `metrics.json` of a finished clustering run.

    Args:
        path: its folder.
        *needed: names of other files that must be there.

    Raises:
        RunFolderError: it is not finished, is of language models, or of another version.
        CorruptFileError: one of the two is damaged.
    """
    config = read_config(path)
    if config.get("mode") == "language":
        raise RunFolderError(f"{path} is a run of language models: it has no clusters")
    for name in ("metrics.json", *needed, assignments_of(path).name):
        if not (path / name).is_file():
            raise RunFolderError(
                f"{path} has no {name}, so it is not a finished run: finish it by --resume "
                f"--run_name {path.name}"
            )
    metrics = read_metrics(path)
    missing = {"settings", "learns_from"} - config.keys() | {"teacher", "table"} - metrics.keys()
    if missing := missing | {"pictured"} - metrics.get("dataset", {}).keys():
        raise RunFolderError(
            f"config.json and metrics.json of {path} have no {min(missing)}: another version wrote "
            f"them, commit {config.get('commit')}. Install that commit, or run again"
        )
    return config, metrics


def write_assignments(folder: Path, splits: Mapping[str, Assignments]) -> None:
    """`assignments.csv`: file, cluster, confidence, split, and the label where any is known.

    Then `outlier`, the next likely clusters with their probabilities, TOP_K clusters in all, and
    the cluster at each level of the tree. Of more than `CSV_ROWS` rows, `assignments.parquet`.
    """
    labelled = any(split.all_labels is not None for split in splits.values())
    columns = next(iter(splits.values())).columns(labelled)

    def write(file: BinaryIO) -> None:
        file.write((",".join(columns) + "\n").encode())
        for name, split in splits.items():
            file.writelines(lines.encode() for lines in split.lines(name, columns))

    def write_parquet(file: BinaryIO) -> None:
        schema = _schema(columns)
        with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            for name, split in splits.items():
                for batch in split.batches(name, schema):
                    writer.write_batch(batch)

    if sum(split.store.n for split in splits.values()) <= CSV_ROWS:
        atomic_write(folder / "assignments.csv", write)
    else:
        atomic_write(folder / "assignments.parquet", write_parquet)


def append_assignments(folder: Path, before: Path, found: Assignments, split: str) -> None:
    """A file as it is, a CSV to the byte, then new samples in the same columns and format."""

    def write(file: BinaryIO) -> None:
        with open(before, newline="", encoding="utf-8") as old:
            columns = next(csv.reader(old))
        with open(before, "rb") as old:
            shutil.copyfileobj(old, file)
        file.writelines(lines.encode() for lines in found.lines(split, columns))

    def write_parquet(file: BinaryIO) -> None:
        with parquet.ParquetFile(before) as old:
            schema = old.schema_arrow
            with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
                for batch in old.iter_batches(ROWS_PER_GROUP):
                    writer.write_batch(batch)
                for batch in found.batches(split, schema):
                    writer.write_batch(batch)

    atomic_write(folder / before.name, write if before.suffix == ".csv" else write_parquet)


def _schema(columns: Sequence[str]) -> arrow.Schema:
    kinds = {"file": arrow.string(), **dict.fromkeys(("split", "label"), _CATEGORY)}
    kinds |= {name: arrow.float32() for name in columns if name.endswith("confidence")}
    kinds["outlier"] = arrow.float32()
    return arrow.schema([(name, kinds.get(name, arrow.int32())) for name in columns])


_CATEGORY = arrow.dictionary(arrow.int32(), arrow.string())
