"""The samples of a finished run: who is where, and what it was computed from."""

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
from ssl_kd.store import EmbeddingStore, find_neighbours
from ssl_kd.vision.assignments import assignments_of, read_finished
from ssl_kd.vision.model import has_pictures

NEEDED = ("file", "cluster", "confidence", "split")


class Samples:
    """Every sample of a finished clustering run, of all its splits, numbered from 0.

    Opening it reads `config.json`, `metrics.json` and the file of assignments; embeddings, images
    and neighbours are looked for when they are asked for, where the run found them.

    Args:
        path: a run's folder.

    Attributes:
        path: the folder.
        config: `config.json`, with the settings of the run.
        metrics: `metrics.json`.
        table: a row for each sample; the columns of the file of assignments: `file`, `cluster`,
            `confidence`, `split`, perhaps `label`, `outlier`, `second` ... and `level_5` ...

    Raises:
        RunFolderError: no run, one that is not finished, or one of language models.
        CorruptFileError: a file of it is damaged, or was edited so that rows or columns are gone.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = run_folder(path).resolve()  # runs/latest may be another run's by then
        self.config, self.metrics = read_finished(self.path)
        self.table = read_table(assignments_of(self.path))
        self._stores: dict[str, EmbeddingStore] = {}
        self._pictures: dict[str, tuple[ImageDataset | FeatureDataset, dict[str, int]] | None] = {}

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the run, by their UPPER_CASE names."""
        return self.config["settings"]

    def __len__(self) -> int:
        return self.table.num_rows

    @cached_property
    def splits(self) -> dict[str, range]:
        """The numbers of the samples of each split: `train`, perhaps `test`, `extend1`, ...

        Raises:
            CorruptFileError: the rows of one do not lie side by side.
        """
        names = self.table.column("split").combine_chunks()
        found: dict[str, range] = {}
        for run in _runs(names):
            name = str(names[run.start])
            if name in found:
                raise CorruptFileError(
                    f"{assignments_of(self.path)} was sorted or edited: the rows of split {name} "
                    "do not lie side by side. Take another copy, or run again"
                )
            found[name] = run
        return found

    def column(self, name: str, split: str | None = None) -> NDArray[Any]:
        """One column of the table: numbers as they are, text as objects.

        Args:
            name: of the column.
            split: whose samples; None: all.

        Raises:
            InputError: there is none of that name, or no such split.
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
        """The columns of the tree, coarsest first, with `cluster` among them where it belongs."""
        levels = [name for name in self.table.column_names if name.startswith("level_")]
        if not levels:
            return ["cluster"]
        sizes = {name: int(name.removeprefix("level_")) for name in levels}
        return sorted([*levels, "cluster"], key=lambda n: sizes.get(n, self.n_clusters))

    @property
    def n_clusters(self) -> int:
        """K, with those that an extension offered."""
        return int(self.metrics["dataset"]["n_clusters"])

    # --- What it was computed from ---------------------------------------------------------------

    def store(self, split: str = "train") -> EmbeddingStore:
        """The embeddings of one split, in the order of its samples; opened once.

        Raises:
            InputError: no such split; RunFolderError: the cache holds other samples by now.
            FileNotFoundError: the cache is gone; the message says where it was.
        """
        rows = self._split(split)
        if split in self._stores:
            return self._stores[split]
        folder, name = self._cache_of(split)
        if not Path(folder).is_dir():
            raise FileNotFoundError(
                f"the embeddings of {self.path} ({split}) were in {Path(folder).absolute()}, and "
                "are not there: stand where the run was started, or put them back"
            )
        store = EmbeddingStore.open(folder, name, verify=False)
        digest = self._digest_of(split)
        if store.n != len(rows) or digest not in (None, store.fingerprint.digest):
            raise RunFolderError(
                f"{folder} holds other samples ({store.n}) than {self.path} clustered "
                f"({len(rows)}): give every run an --embeddings_dir of its own"
            )
        store.relabel(*self._labels(split))
        self._stores[split] = store
        return store

    def _labels(self, split: str) -> tuple[Tensor | None, list[str] | None]:
        """The labels that the run scored by: its cache may hold others, or those of no run."""
        if "label" not in self.table.column_names:
            return None, None
        seen = sorted(text for text in self.table.column("label").unique().to_pylist() if text)
        names = list(dict.fromkeys([*(self.metrics["dataset"].get("class_names") or ()), *seen]))
        numbers = {name: number for number, name in enumerate(names)}
        labels = [numbers.get(text, -1) for text in self.column("label", split).tolist()]
        return torch.tensor(labels), names

    def embeddings(self, rows: Sequence[int] | NDArray[np.integer] | Tensor) -> Tensor:
        """Of some samples, float32 `[row, dim]`, as the teacher gave them."""
        wanted = torch.as_tensor(np.asarray(rows), dtype=torch.int64)
        found: Tensor | None = None
        for split, run in self.splits.items():
            own = (wanted >= run.start) & (wanted < run.stop)
            if own.any():
                x = self.store(split).gather(wanted[own] - run.start)
                found = torch.empty(len(wanted), x.shape[1]) if found is None else found
                found[own] = x
        return torch.empty(0, 0) if found is None else found

    def neighbours(self, k: int, split: str = "train") -> NDArray[np.int64]:
        """The k nearest others in the same split `[n, k]`, numbers of samples, nearest first.

        Those that the run left beside its embeddings, found anew where it left fewer.
        """
        found, _ = find_neighbours(self.store(split), k, search="auto")
        return found.numpy() + self.splits[split].start

    def image(self, row: int) -> Image.Image | None:
        """The picture of one sample; None where the run learned from features without images.

        Raises:
            FileNotFoundError: it is no longer where the run found it.
            UnreadableImage: it cannot be decoded.
        """
        picture = self._picture(row)
        return None if picture is None else picture[0].image(picture[1])

    def image_file(self, row: int) -> Path | None:
        """Where a sample's picture lies on the disk; None where it is not a file of its own."""
        picture = self._picture(row)
        return None if picture is None else picture[0].image_file(picture[1])

    def _picture(self, row: int) -> tuple[ImageDataset | FeatureDataset, int] | None:
        """The data set that a sample's picture is in, and its number there."""
        split = next(name for name, run in self.splits.items() if row in run)
        if split not in self._pictures:
            self._pictures[split] = self._open_pictures(split)
        if (pictures := self._pictures[split]) is None:
            return None
        dataset, numbers = pictures
        name, place = str(self.table.column("file")[row]), row - self.splits[split].start
        if place < len(dataset) and dataset.ids[place] == name:  # several rows may share an id
            return dataset, place
        if numbers.get(name, -1) < 0:
            what = "of several rows" if name in numbers else "no longer"
            raise FileNotFoundError(f"{name} is {what} in {dataset.name}")
        return dataset, numbers[name]

    def _open_pictures(
        self, split: str
    ) -> tuple[ImageDataset | FeatureDataset, dict[str, int]] | None:
        if not has_pictures(self.metrics):
            return None
        added, other = self._extension(split), self.settings["DATASET_TEST"]
        name, alone = self.settings["DATASET"], False
        if added is not None:
            name = added["dataset"]
        elif split == "test" and other is not None:
            name, alone = other, True
        kind = "test" if split == "test" else "train"
        root, column = self.settings["DATA_DIR"], self.settings["COLUMN"]
        dataset = open_dataset(name, kind, root=root, whole=alone, column=column)
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

    def _cache_of(self, split: str) -> tuple[str, str]:
        if (added := self._extension(split)) is not None:
            return added["embeddings"], "extend"
        return self.settings["EMBEDDINGS_DIR"], split

    def _digest_of(self, split: str) -> str | None:
        if (added := self._extension(split)) is not None:
            return added["digest"]
        return self.config["learns_from"] if split == "train" else None

    def _extension(self, split: str) -> dict[str, Any] | None:
        """What was added as this split; None of the run's own."""
        if not split.startswith("extend"):
            return None
        return self.config["extensions"][int(split.removeprefix("extend")) - 1]


def _runs(names: arrow.Array) -> list[range]:
    """The stretches of equal names."""
    codes = names.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    ends = np.flatnonzero(np.diff(codes)) + 1
    places = [0, *ends.tolist(), len(codes)]
    return [range(a, b) for a, b in zip(places, places[1:], strict=False) if b > a]


def read_table(path: Path, columns: Collection[str] | None = None) -> arrow.Table:
    """Read a run's file of assignments, names of files as they were before they became cells.

    Args:
        path: `assignments.csv` or `.parquet`.
        columns: those that are wanted, where the file has them; None for all.

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
