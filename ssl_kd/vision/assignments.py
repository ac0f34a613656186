"""Assign every sample to a cluster, and write `assignments.csv` or `assignments.parquet`."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as arrow
import torch
from pyarrow import parquet

from ssl_kd.core.errors import RunFolderError
from ssl_kd.core.files import atomic_write
from ssl_kd.core.files.cells import csv_field
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.model import ROWS_PER_BLOCK, ClusterModel, read_config, read_object
from ssl_kd.vision.train.pairs import sample_rows

TOP_K = 3  # number of clusters that are listed for each sample
JUDGED_ROWS = 100_000  # maximum number of samples that are scored
CSV_ROWS = 1_000_000  # maximum rows of a CSV file; more are written as Parquet
ROWS_PER_GROUP = 131_072  # rows in a row group of a Parquet file
PLACES = ("second", "third")


class SplitAssignments:
    """Predicted clusters of all samples of a split, and a random sample of rows to score.

    Heads and baselines are compared on the same `rows`.
    """

    def __init__(self, store: EmbeddingStore, model: ClusterModel, seed: int) -> None:
        self.store = store
        self.seed = seed
        n = store.n
        self.sizes = model.options["levels"] or []  # clusters of each tree level, finest first
        k = min(TOP_K, model.n_clusters)
        clusters = torch.empty(n, k, dtype=torch.int32)  # most probable first
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
        self.clusters, self.levels = self.likely[:, 0], tree.numpy()
        self.all_labels = None if store.labels is None else store.labels.numpy()

        self.rows = sample_rows(store.n, seed, JUDGED_ROWS)
        self.x = store.gather(self.rows).numpy()
        self.labels = None if self.all_labels is None else self.all_labels[self.rows.numpy()]

    def blocks(self, split: str, rows_per_block: int) -> Iterator[dict[str, Any]]:
        """Yield blocks of rows as dicts: column name -> list of texts or array of numbers."""
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
        """Yield the CSV lines of the split, a block at a time; unknown columns are empty."""
        for block in self.blocks(split, ROWS_PER_BLOCK):
            empty = [""] * len(block["file"])
            texts = [_as_text(block.get(name, empty)) for name in columns]
            yield "".join(",".join(row) + "\n" for row in zip(*texts, strict=True))

    def batches(self, split: str, schema: arrow.Schema) -> Iterator[arrow.RecordBatch]:
        """Yield the split as Parquet row groups; columns of the schema without data are null."""
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
    """Return the path of a run's `assignments.parquet` if it exists, else of `assignments.csv`."""
    large = folder / "assignments.parquet"
    return large if large.is_file() else folder / "assignments.csv"


def read_finished(path: Path, *needed: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read `config.json` and `metrics.json` of a finished clustering run.

    Raise RunFolderError if the run is of another kind or version, or lacks a `needed` file.
    """
    config = read_config(path)
    if config.get("mode") == "language":
        raise RunFolderError(
            f"{path} is a run of language models, which has no clusters; expected a clustering run"
        )
    for name in ("metrics.json", *needed, assignments_of(path).name):
        if not (path / name).is_file():
            raise RunFolderError(
                f"{path} has no {name}, so it is not a finished run: finish it with --resume "
                f"--run_name {path.name}"
            )
    metrics = read_object(path / "metrics.json")
    missing = {"settings", "learns_from"} - config.keys() | {"teacher", "table"} - metrics.keys()
    if missing := missing | {"pictured"} - metrics.get("dataset", {}).keys():
        raise RunFolderError(
            f"config.json and metrics.json of {path} have no {min(missing)}: another version wrote "
            f"them (commit {config.get('commit')}). Install that commit, or run again"
        )
    return config, metrics


def write_assignments(
    folder: Path, splits: Mapping[str, SplitAssignments], before: Path | None = None
) -> None:
    """Write `assignments.csv`, or `assignments.parquet` if there are more than `CSV_ROWS` rows.

    The columns are those of `SplitAssignments.blocks`, without the label if none is known.
    `before` is another run's file to copy first; its format and columns are then used.
    """
    labeled = any(split.all_labels is not None for split in splits.values())
    names = next(next(iter(splits.values())).blocks("", rows_per_block=1))
    columns = [name for name in names if labeled or name != "label"]
    is_csv = sum(split.store.n for split in splits.values()) <= CSV_ROWS
    if before is not None:
        is_csv = before.suffix == ".csv"

    def write_csv(file: BinaryIO) -> None:
        names = columns
        if before is None:
            file.write((",".join(names) + "\n").encode())
        else:
            with open(before, newline="", encoding="utf-8") as old:
                names = next(csv.reader(old))
            with open(before, "rb") as old:
                shutil.copyfileobj(old, file)
        for name, split in splits.items():
            file.writelines(lines.encode() for lines in split.lines(name, names))

    def write_parquet(file: BinaryIO) -> None:
        schema = _schema(columns) if before is None else parquet.read_schema(before)
        with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            if before is not None:
                with parquet.ParquetFile(before) as old:
                    for batch in old.iter_batches(ROWS_PER_GROUP):
                        writer.write_batch(batch)
            for name, split in splits.items():
                for batch in split.batches(name, schema):
                    writer.write_batch(batch)

    name = "assignments.csv" if is_csv else "assignments.parquet"
    atomic_write(folder / name, write_csv if is_csv else write_parquet)


def _schema(columns: Sequence[str]) -> arrow.Schema:
    kinds = {"file": arrow.string(), **dict.fromkeys(("split", "label"), _CATEGORY)}
    kinds |= {name: arrow.float32() for name in columns if name.endswith("confidence")}
    kinds["outlier"] = arrow.float32()
    return arrow.schema([(name, kinds.get(name, arrow.int32())) for name in columns])


_CATEGORY = arrow.dictionary(arrow.int32(), arrow.string())
