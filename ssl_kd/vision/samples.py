"""The samples of a finished run: their clusters, embeddings, neighbors and pictures."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import torch
from numpy.typing import NDArray
from PIL import Image
from pyarrow import csv, parquet
from torch import Tensor

from ssl_kd.datasets import FeatureDataset, ImageDataset, open_dataset
from ssl_kd.errors import InputError, RunFolderError
from ssl_kd.files import CorruptFileError
from ssl_kd.files.cells import from_cells
from ssl_kd.settings.early import run_folder
from ssl_kd.store import EmbeddingStore, find_neighbors
from ssl_kd.vision.assignments import assignments_of, read_finished
from ssl_kd.vision.model import has_pictures

NEEDED = ("file", "cluster", "confidence", "split")


class Samples:
    """All samples of a finished clustering run, of all splits, numbered from 0.

    Opening reads `config.json`, `metrics.json` and the file of assignments. Embeddings, images and
    neighbors are read when they are first used, from where the run read them.

    Args:
        path: a run's folder.

    Attributes:
        path: the folder.
        config: `config.json`, with the settings of the run.
        metrics: `metrics.json`.
        table: a row for each sample; the columns of the file of assignments: `file`, `cluster`,
            `confidence`, `split`, perhaps `label`, `outlier`, `second` ... and `level_5` ...

    Raises:
        RunFolderError: not a run, one that is not finished, or one of language models.
        CorruptFileError: a file is damaged, or was edited so that rows or columns are missing.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = run_folder(path).resolve()  # runs/latest may be another run's by then
        self.config, self.metrics = read_finished(self.path)
        self.table = read_table(assignments_of(self.path))
        self._stores: dict[str, EmbeddingStore] = {}
        self._pictures: dict[str, tuple[ImageDataset | FeatureDataset, dict[str, int]] | None] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run by their UPPER_CASE names."""
        return self.config["settings"]

    def __len__(self) -> int:
        return self.table.num_rows

    @cached_property
    def splits(self) -> dict[str, range]:
        """Numbers of the samples of each split: `train`, perhaps `test`, `extend1`, ...

        Raises:
            CorruptFileError: the rows of a split are not contiguous.
        """
        names = self.table.column("split").combine_chunks()
        codes = names.dictionary_encode().indices.to_numpy(zero_copy_only=False)
        bounds = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), len(codes)]
        splits: dict[str, range] = {}
        for start, stop in zip(bounds, bounds[1:], strict=False):
            if start == stop:
                continue
            if (name := str(names[start])) in splits:
                raise CorruptFileError(
                    f"{assignments_of(self.path)} was sorted or edited: the rows of split {name} "
                    "do not lie side by side. Take another copy, or run again"
                )
            splits[name] = range(start, stop)
        return splits

    def column(self, name: str, split: str | None = None) -> NDArray[Any]:
        """Return one column of the table, of one split or of all samples; text as objects.

        Raises:
            InputError: there is no such column or split.
        """
        if name not in self.table.column_names:
            raise InputError(
                f"{self.path} has no column {name!r}, only {', '.join(self.table.column_names)}"
            )
        if split is None:
            return self.table.column(name).to_numpy()
        rows = self._split(split)
        return self.table.column(name).slice(rows.start, len(rows)).to_numpy()

    @property
    def levels(self) -> list[str]:
        """Columns of the tree, coarsest first, with `cluster` in its place."""
        levels = [name for name in self.table.column_names if name.startswith("level_")]
        if not levels:
            return ["cluster"]
        sizes = {name: int(name.removeprefix("level_")) for name in levels}
        return sorted([*levels, "cluster"], key=lambda n: sizes.get(n, self.n_clusters))

    @property
    def n_clusters(self) -> int:
        """Number of clusters, including those that extensions added."""
        return int(self.metrics["dataset"]["n_clusters"])

    def store(self, split: str = "train") -> EmbeddingStore:
        """Return the embeddings of one split, in the order of its samples; opened once.

        Raises:
            InputError: no such split; RunFolderError: the cache holds other samples now.
            FileNotFoundError: the cache is gone; the message names its folder.
        """
        rows = self._split(split)
        if split in self._stores:
            return self._stores[split]
        added = self._extension(split)
        if added is not None:
            folder, name, digest = added["embeddings"], "extend", added["digest"]
        else:
            digest = self.config["learns_from"] if split == "train" else None
            folder, name = self.settings["EMBEDDINGS_DIR"], split
        if not Path(folder).is_dir():
            raise FileNotFoundError(
                f"the embeddings of {self.path} ({split}) were in {Path(folder).absolute()}, and "
                "are not there: start from the folder that the run was started in, or put them back"
            )
        store = EmbeddingStore.open(folder, name, verify=False)
        if store.n != len(rows) or digest not in (None, store.fingerprint.digest):
            raise RunFolderError(
                f"{folder} holds other samples ({store.n}) than {self.path} clustered "
                f"({len(rows)}): give every run an --embeddings_dir of its own"
            )
        store.relabel(*self._labels(split))
        self._stores[split] = store
        return store

    def _labels(self, split: str) -> tuple[Tensor | None, list[str] | None]:
        """Return the labels that the run was scored by; those of the cache may differ."""
        if "label" not in self.table.column_names:
            return None, None
        texts = sorted(text for text in self.table.column("label").unique().to_pylist() if text)
        names = list(dict.fromkeys([*(self.metrics["dataset"].get("class_names") or ()), *texts]))
        numbers = {name: number for number, name in enumerate(names)}
        labels = [numbers.get(text, -1) for text in self.column("label", split).tolist()]
        return torch.tensor(labels), names

    def embeddings(self, rows: Sequence[int] | NDArray[np.integer] | Tensor) -> Tensor:
        """Return the teacher's embeddings of some samples, float32 `[row, dim]`."""
        numbers = torch.as_tensor(np.asarray(rows), dtype=torch.int64)
        embeddings: Tensor | None = None
        for split, of_split in self.splits.items():
            mask = (numbers >= of_split.start) & (numbers < of_split.stop)
            if mask.any():
                x = self.store(split).gather(numbers[mask] - of_split.start)
                if embeddings is None:
                    embeddings = torch.empty(len(numbers), x.shape[1])
                embeddings[mask] = x
        return torch.empty(0, 0) if embeddings is None else embeddings

    def neighbours(self, k: int, split: str = "train") -> NDArray[np.int64]:
        """Return the k nearest others in the same split `[n, k]`, nearest first.

        They are read from beside the run's embeddings, or searched where fewer are stored.
        """
        neighbors, _ = find_neighbors(self.store(split), k, search="auto")
        return neighbors.numpy() + self.splits[split].start

    def image(self, row: int) -> Image.Image | None:
        """Return the picture of one sample; None if the run was trained on features without images.

        Raises:
            FileNotFoundError: it is no longer where it was.
            UnreadableImage: it cannot be decoded.
        """
        picture = self._picture(row)
        return None if picture is None else picture[0].image(picture[1])

    def image_file(self, row: int) -> Path | None:
        """Return the path of a sample's picture; None if it is not a separate file."""
        picture = self._picture(row)
        return None if picture is None else picture[0].image_file(picture[1])

    def _picture(self, row: int) -> tuple[ImageDataset | FeatureDataset, int] | None:
        """Return the data set that holds a sample's picture, and its row there."""
        split = next(name for name, rows in self.splits.items() if row in rows)
        if split not in self._pictures:
            self._pictures[split] = self._open_pictures(split)
        if (pictures := self._pictures[split]) is None:
            return None
        dataset, numbers = pictures
        name, position = str(self.table.column("file")[row]), row - self.splits[split].start
        if position < len(dataset) and dataset.ids[position] == name:  # rows may share an id
            return dataset, position
        if numbers.get(name, -1) < 0:
            reason = "of several rows" if name in numbers else "no longer"
            raise FileNotFoundError(f"{name} is {reason} in {dataset.name}")
        return dataset, numbers[name]

    def _open_pictures(
        self, split: str
    ) -> tuple[ImageDataset | FeatureDataset, dict[str, int]] | None:
        if not has_pictures(self.metrics):
            return None
        added, other = self._extension(split), self.settings["DATASET_TEST"]
        name, whole = self.settings["DATASET"], False
        if added is not None:
            name = added["dataset"]
        elif split == "test" and other is not None:
            name, whole = other, True
        kind = "test" if split == "test" else "train"
        root, column = self.settings["DATA_DIR"], self.settings["COLUMN"]
        dataset = open_dataset(name, kind, root=root, whole=whole, column=column)
        if not dataset.pictured:
            return None
        numbers: dict[str, int] = {}
        for number, name in enumerate(dataset.ids):
            numbers[name] = -1 if name in numbers else number
        return dataset, numbers

    def _split(self, name: str) -> range:
        if name not in self.splits:
            raise InputError(f"{self.path} has no split {name!r}, only {', '.join(self.splits)}")
        return self.splits[name]

    def _extension(self, split: str) -> dict[str, Any] | None:
        """Return the entry of an added split in `config.json`; None for the run's own splits."""
        if not split.startswith("extend"):
            return None
        return self.config["extensions"][int(split.removeprefix("extend")) - 1]


def read_table(path: Path, columns: Collection[str] | None = None) -> arrow.Table:
    """Read columns of `assignments.csv` or `.parquet`, with the original names of files.

    Raises:
        CorruptFileError: it is damaged, or lacks a column that every run writes.
    """
    needed = [name for name in NEEDED if columns is None or name in columns]
    try:
        if path.suffix == ".parquet":
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                table = file.read([name for name in names if columns is None or name in columns])
            decoded = [_plain(column) for column in table.columns]
            table = arrow.table(dict(zip(table.column_names, decoded, strict=True)))
        else:
            kinds = {name: arrow.string() for name in ("file", "split", "label")}
            parsed = csv.ParseOptions(newlines_in_values=True)
            table = csv.read_csv(path, None, parsed, csv.ConvertOptions(column_types=kinds))
            table = table.select([n for n in table.column_names if columns is None or n in columns])
            for name in {"file", "label"} & {*table.column_names}:
                place = table.column_names.index(name)
                table = table.set_column(place, name, from_cells(table.column(name)))
    except arrow.ArrowInvalid as error:
        raise CorruptFileError(f"{path} is damaged ({error}): copy it again") from error
    if missing := [name for name in needed if name not in table.column_names]:
        raise CorruptFileError(
            f"{path} has no column {missing[0]}: it was edited, or another version wrote it. Take "
            "another copy, or run again"
        )
    return table


def _plain(column: arrow.ChunkedArray) -> arrow.ChunkedArray:
    return column.cast(arrow.string()) if arrow.types.is_dictionary(column.type) else column
