"""The cluster of every sample of a store, written to `assignments.csv` or `.parquet`."""

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
from ssl_kd.vision.model import ROWS_PER_BLOCK, ClusterModel, read_config, read_metrics
from ssl_kd.vision.novelty import without_outliers
from ssl_kd.vision.pairs import sample_rows

TOP_K = 3  # clusters listed for each sample
JUDGED_ROWS = 100_000
CSV_ROWS = 1_000_000  # more are written as Parquet
ROWS_PER_GROUP = 131_072  # of a Parquet file
PLACES = ("second", "third")


class SplitAssignments:
    """The clusters of all samples of a store, and the rows of it that are scored.

    A row takes 16 bytes, 8 for each of TOP_K and 4 for each level of the tree.

    Attributes:
        likely: `[n, TOP_K]` int32, the likeliest clusters, the likeliest first.
        probabilities: `[n, TOP_K]` float32, of these.
        clusters: `[n]` int32, the likeliest, or -1 above the noise threshold.
        confidence: `[n]`, of the likeliest.
        outlier: `[n]`, outlier scores.
        sizes: number of clusters of each level of the tree, finest first; empty without a tree.
        levels: `[n, level]` int32, each sample's, or -1 above the noise threshold.
        all_labels: `[n]`, or None.
        rows: those that are scored, a random part of many.
        x: `[row, dim]`, their embeddings.
        labels: `[row]`, or None.
    """

    def __init__(
        self, store: EmbeddingStore, model: ClusterModel, seed: int, noise_threshold: float | None
    ) -> None:
        self.store, n = store, store.n
        self.sizes = model.options["levels"] or []
        k = min(TOP_K, model.n_clusters)
        clusters = torch.empty(n, k, dtype=torch.int32)
        probabilities, outlier = torch.empty(n, k), torch.empty(n)
        tree = torch.empty(n, len(self.sizes), dtype=torch.int32)
        for start, x in store.blocks(ROWS_PER_BLOCK):
            rows = slice(start, start + len(x))
            clusters[rows], probabilities[rows] = model.likeliest(x, k)
            outlier[rows] = model.outlier_scores(x)
            if self.sizes:
                tree[rows] = model.predict_levels(x, clusters[rows, 0].long()).int()
        self.likely, self.probabilities = clusters.numpy(), probabilities.numpy()
        self.outlier, self.confidence = outlier.numpy(), self.probabilities[:, 0]
        first = clusters[:, 0]
        if noise_threshold is not None:
            first = without_outliers(first, outlier, noise_threshold)
        self.clusters = first.numpy()
        self.levels = tree.masked_fill_(first.unsqueeze(1) < 0, -1).numpy()
        self.all_labels = None if store.labels is None else store.labels.numpy()

        # Heads and baselines are compared on the same rows.
        self.rows = sample_rows(store.n, seed, JUDGED_ROWS)
        self.x = store.gather(self.rows).numpy()
        self.labels = None if self.all_labels is None else self.all_labels[self.rows.numpy()]

    @property
    def members(self) -> NDArray[np.int32]:
        """The clusters of all samples but noise."""
        return self.clusters[self.clusters >= 0]

    def columns(self, labelled: bool) -> list[str]:
        """Return the names of the file's columns."""
        more = PLACES[: self.likely.shape[1] - 1]
        return [
            *("file", "cluster", "confidence", "split"),
            *(["label"] if labelled else []),
            "outlier",
            *(name for place in more for name in (place, f"{place}_confidence")),
            *(f"level_{size}" for size in self.sizes),
        ]

    def blocks(self, split: str, rows_per_block: int) -> Iterator[dict[str, Any]]:
        """Yield the columns of blocks of rows: lists of text, arrays of numbers."""
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
        """Yield lines of CSV, thousands at a time; unknown columns are empty."""
        for block in self.blocks(split, ROWS_PER_BLOCK):
            empty = [""] * len(block["file"])
            texts = [_as_text(block.get(name, empty)) for name in columns]
            yield "".join(",".join(row) + "\n" for row in zip(*texts, strict=True))

    def batches(self, split: str, schema: arrow.Schema) -> Iterator[arrow.RecordBatch]:
        """Yield row groups of Parquet; unknown columns are null."""
        for block in self.blocks(split, ROWS_PER_GROUP):
            nulls = [None] * len(block["file"])
            arrays = [arrow.array(block.get(f.name, nulls), f.type) for f in schema]
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
    """Return the path of a run's assignments; that of the CSV if there are none yet."""
    large = folder / "assignments.parquet"
    return large if large.is_file() else folder / "assignments.csv"


def read_finished(path: Path, *needed: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read `config.json` and `metrics.json` of a finished clustering run.

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


def write_assignments(folder: Path, splits: Mapping[str, SplitAssignments]) -> None:
    """Write `assignments.csv`, or for more than `CSV_ROWS` rows `assignments.parquet`.

    Columns are file, cluster, confidence, split, the label where any is known, the outlier score,
    the next likely clusters with their probabilities, and the cluster at each level of the tree.
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


def append_assignments(folder: Path, before: Path, added: SplitAssignments, split: str) -> None:
    """Copy a file of assignments, a CSV byte by byte, and append new samples."""

    def write(file: BinaryIO) -> None:
        with open(before, newline="", encoding="utf-8") as old:
            columns = next(csv.reader(old))
        with open(before, "rb") as old:
            shutil.copyfileobj(old, file)
        file.writelines(lines.encode() for lines in added.lines(split, columns))

    def write_parquet(file: BinaryIO) -> None:
        with parquet.ParquetFile(before) as old:
            schema = old.schema_arrow
            with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
                for batch in old.iter_batches(ROWS_PER_GROUP):
                    writer.write_batch(batch)
                for batch in added.batches(split, schema):
                    writer.write_batch(batch)

    atomic_write(folder / before.name, write if before.suffix == ".csv" else write_parquet)


def _schema(columns: Sequence[str]) -> arrow.Schema:
    kinds = {"file": arrow.string(), **dict.fromkeys(("split", "label"), _CATEGORY)}
    kinds |= {name: arrow.float32() for name in columns if name.endswith("confidence")}
    kinds["outlier"] = arrow.float32()
    return arrow.schema([(name, kinds.get(name, arrow.int32())) for name in columns])


_CATEGORY = arrow.dictionary(arrow.int32(), arrow.string())
