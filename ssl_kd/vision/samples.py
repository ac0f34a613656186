"""Read the samples of a finished run: clusters, embeddings, neighbors and pictures."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as arrow
import torch
from numpy.typing import NDArray
from PIL import Image
from pyarrow import csv, parquet
from torch import Tensor

from ssl_kd.core.errors import InputError, RunFolderError, UserError
from ssl_kd.core.files import CorruptFileError, atomic_write_json
from ssl_kd.core.files.cells import from_cells
from ssl_kd.core.images.levels import Levels
from ssl_kd.core.settings.early import DATASETS, home_resolved, run_folder
from ssl_kd.vision.assignments import assignments_of, read_finished
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.cluster_words import MOST_TEXTS, ClusterWords
from ssl_kd.vision.data import FeatureDataset, ImageDataset, SampleDataset, open_dataset
from ssl_kd.vision.data.catalog import open_rows
from ssl_kd.vision.data.media import Rows
from ssl_kd.vision.data.sounds import SoundFolder
from ssl_kd.vision.data.tables import find_rows, open_table
from ssl_kd.vision.evaluate.sample import random_rows
from ssl_kd.vision.model import has_pictures, read_object
from ssl_kd.vision.sources import Source, SourceChanged, read_sources

logger = logging.getLogger(__name__)

NEEDED = ("file", "cluster", "confidence", "split")
JOINED, MEDIA = "metadata.parquet", "media.json"
"""Files of a run: columns that a user joined, one row per sample, and the column to show."""


class SampleWords(NamedTuple):
    """The words of some samples of a run."""

    rows: NDArray[np.int64]
    words: ClusterWords

    def names(self, clusters: NDArray[np.integer]) -> dict[int, str]:
        """Return cluster -> its distinctive words, for the clusters of all samples `[n]`."""
        return self.words.names(clusters[self.rows])


class Samples:
    """All samples of a finished clustering run, numbered from 0 across its splits.

    Embeddings, pictures and neighbors are read when they are first used, from the folders that the
    run itself read.

    Args:
        path: folder of the run.
        media: column of the data set, or of the joined metadata, that shows what a sample is; it is
            remembered for the run. None: the column that was chosen before, or a column of
            pictures, sounds, links or texts that is found.

    Attributes:
        path: folder of the run.
        config: content of `config.json`, with the settings of the run.
        metrics: content of `metrics.json`.
        table: the file of assignments, one row per sample, with the columns `file`, `cluster`,
            `confidence` and `split`, and optional ones such as `label`, `outlier` and `level_5`.

    Raises:
        RunFolderError: the folder holds no run, an unfinished run, or a run of language models.
        CorruptFileError: a file is damaged, or was edited so that columns are missing.
    """

    def __init__(self, path: str | Path, media: str | None = None) -> None:
        self.path = run_folder(path).resolve()  # runs/latest may be another run's by then
        self.config, self.metrics = read_finished(self.path)
        self.table = read_table(assignments_of(self.path))
        self._stores: dict[str, EmbeddingStore] = {}
        self.rows = functools.cache(self._open_rows)  # of a split
        self.places = functools.cache(self._find_places)
        chosen = self.path / MEDIA
        remembered = read_object(chosen).get("column") if chosen.is_file() else None
        self._column = remembered if media is None else media
        if media is not None:
            if not isinstance(self._joined or self.rows("train"), Rows):
                raise InputError(
                    f"--media is {media!r}, but {self.settings['DATASET']} has no columns: add a "
                    "table that has it with ssl_kd explore RUN --metadata TABLE"
                )
            atomic_write_json(chosen, {"column": media})

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run: UPPER_CASE name -> value."""
        return self.config["settings"]

    def __len__(self) -> int:
        return self.table.num_rows

    @cached_property
    def splits(self) -> dict[str, range]:
        """Row numbers of each split: `train`, and possibly `test`, `extend1`, `extend2`, ...

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
                    "are not contiguous. Use another copy of the file, or run again"
                )
            splits[name] = range(start, stop)
        return splits

    def column(self, name: str, split: str | None = None) -> NDArray[Any]:
        """Return a column of `table` for all samples, or for those of one split.

        Raises:
            InputError: the column or the split does not exist.
        """
        if name not in self.table.column_names:
            raise InputError(
                f"{self.path} has no column {name!r}; expected one of "
                f"{', '.join(self.table.column_names)}"
            )
        if split is None:
            return self.table.column(name).to_numpy()
        rows = self._split(split)
        return self.table.column(name).slice(rows.start, len(rows)).to_numpy()

    @property
    def levels(self) -> list[str]:
        """Names of the columns with tree levels, coarsest first, including `cluster`."""
        levels = [name for name in self.table.column_names if name.startswith("level_")]
        if not levels:
            return ["cluster"]
        sizes = {name: int(name.removeprefix("level_")) for name in levels}
        return sorted([*levels, "cluster"], key=lambda n: sizes.get(n, self.n_clusters))

    @property
    def n_clusters(self) -> int:
        """Number of clusters, including clusters that extensions added."""
        return int(self.metrics["dataset"]["n_clusters"])

    def store(self, split: str = "train") -> EmbeddingStore:
        """Open the embeddings of a split, in the order of its samples.

        Raises:
            InputError: the split does not exist.
            RunFolderError: the cache now holds embeddings of other samples.
            FileNotFoundError: the cache does not exist any more.
        """
        rows = self._split(split)
        if split in self._stores:
            return self._stores[split]
        added = self._extension(split)
        if added is not None:
            folder = added["embeddings"]
            name = "extend"
            digest = added["digest"]
        else:
            digest = self.config["learns_from"] if split == "train" else None
            folder, name = self.settings["EMBEDDINGS_DIR"], split
        folder = self._located(folder, split)
        if not Path(folder).is_dir():
            raise FileNotFoundError(
                f"the embeddings of {self.path} ({split}) are missing; expected them in "
                f"{Path(folder).absolute()}: put them back"
            )
        store = EmbeddingStore.open(folder, name, verify=False)
        if store.n != len(rows) or digest not in (None, store.fingerprint.digest):
            raise RunFolderError(
                f"{folder} holds {store.n} embeddings, but not those of the {len(rows)} samples of "
                f"{self.path}, which a later run replaced: extract them again, with a separate "
                "--embeddings_dir for each data set"
            )
        store.relabel(*self._labels(split))
        self._stores[split] = store
        return store

    def _labels(self, split: str) -> tuple[Tensor | None, list[str] | None]:
        """Return labels and class names of a split from `table`; the cache may have others."""
        if "label" not in self.table.column_names:
            return None, None
        texts = sorted(text for text in self.table.column("label").unique().to_pylist() if text)
        names = list(dict.fromkeys([*(self.metrics["dataset"].get("class_names") or ()), *texts]))
        numbers = {name: number for number, name in enumerate(names)}
        labels = [numbers.get(text, -1) for text in self.column("label", split).tolist()]
        return torch.tensor(labels), names

    def embeddings(self, rows: Sequence[int] | NDArray[np.integer] | Tensor) -> Tensor:
        """Return the teacher's embeddings of the samples in `rows`, float32 `[row, dim]`."""
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

    def image(self, row: int) -> Image.Image | None:
        """Decode the picture of a sample; return None if the samples have no pictures.

        Raises:
            FileNotFoundError: the picture does not exist any more, or has changed since the run.
            UnreadableImage: the picture cannot be decoded.
        """
        picture = self._picture(row)
        return None if picture is None else picture[0].image(picture[1])

    def image_file(self, row: int) -> Path | None:
        """Return the path of a sample's picture; None if the picture is not a separate file."""
        picture = self._picture(row)
        return None if picture is None else picture[0].image_file(picture[1])

    def text(self, row: int) -> str | None:
        """Return the text or link that a sample is; None if the samples are neither.

        Raises:
            FileNotFoundError: the sample is no longer in the data set.
        """
        if (self.media or {}).get("kind") not in ("text", "url"):
            return None
        rows, place = self.row_of_data(row) or (None, 0)
        return rows.text(place) if isinstance(rows, Rows) else None

    def sound(self, row: int) -> tuple[str, bytes] | None:
        """Return the type and content of the sound file that a sample is; None without one.

        Raises:
            FileNotFoundError: the sound does not exist any more, or has changed since the run.
        """
        if (self.media or {}).get("kind") != "audio":
            return None
        rows, place = self.row_of_data(row) or (None, 0)
        return rows.sound(place) if isinstance(rows, Rows | SoundFolder) else None

    @cached_property
    def words(self) -> SampleWords | None:
        """The words of the texts, or of 20,000 random ones; None if the samples are no texts."""
        if (self.media or {}).get("kind") != "text":
            return None
        rows, texts = random_rows(len(self), MOST_TEXTS, 0), []
        for row in rows.tolist():
            try:
                texts.append(self.text(row) or "")
            except SourceChanged as error:
                logger.warning("clusters are not named by the words of their texts: %s", error)
                return None
            except FileNotFoundError:  # the text has changed, as a warning says
                texts.append("")
        return SampleWords(rows, ClusterWords(texts))

    @cached_property
    def media(self) -> dict[str, str] | None:
        """What shows a sample: `kind` (image, audio, text or url) and `column`, or None."""
        try:
            rows = self._joined or self.rows("train")
        except (UserError, OSError) as error:
            logger.warning("the data set cannot be opened, so samples are not shown: %s", error)
            return None
        if isinstance(rows, SampleDataset):
            return {"kind": rows.kind, "column": "file"}
        return None if rows is None else rows.media

    @property
    def media_root(self) -> Path | None:
        """The folder of relative paths in the column that shows the samples; None without paths."""
        rows = None if self.media is None else self._joined or self.rows("train")
        if not isinstance(rows, Rows) or rows.kind not in ("image", "audio"):
            return None
        return rows.table.root.absolute()

    @property
    def kind(self) -> str:
        """What the teacher embedded: `image`, `text`, `audio` or `features`."""
        before = "image" if has_pictures(self.metrics) else "features"
        return self.metrics["dataset"].get("kind", before)

    @property
    def pictured(self) -> bool:
        """Whether the samples have pictures."""
        return has_pictures(self.metrics) or (self.media or {}).get("kind") == "image"

    def _picture(self, row: int) -> tuple[ImageDataset | Rows, int] | None:
        if not self.pictured:
            return None
        data, place = self.row_of_data(row) or (None, 0)
        if isinstance(data, ImageDataset | Rows) and data.pictured:
            return data, place
        return None

    def row_of_data(self, row: int) -> tuple[SampleDataset | Rows, int] | None:
        """Return the data set that shows a sample, and its row there; None if it shows nothing.

        Raises:
            FileNotFoundError: the data set, or the file of the sample, has changed.
        """
        if self._joined is not None:
            return self._joined, row
        split = next(name for name, rows in self.splits.items() if row in rows)
        if (dataset := self.rows(split)) is None:
            return None
        sample = row - self.splits[split].start
        if (place := int(self.places(split)[sample])) < 0:
            raise FileNotFoundError(
                f"the sample {self.table.column('file')[row]} is no longer in {dataset.name} as it "
                "was: restore the data set that the run was trained on"
            )
        if split in self._sources:
            self._sources[split].check_file(sample, dataset, place)
        return dataset, place

    @cached_property
    def _joined(self) -> Rows | None:
        """The joined metadata, if the column that shows a sample is in them."""
        path = self.path / JOINED
        table = open_table(path) if self._column is not None and path.is_file() else None
        if table is None or self._column not in table.kinds:
            return None
        return Rows(table, media=self._column)

    def _open_rows(self, split: str) -> SampleDataset | Rows | None:
        """Open the images or sounds, or the table, that a split was read from.

        It is None for features in other files, such as `.npy`.
        """
        name, kind, options = self._origin(split)
        media = None if self._joined is not None else self._column
        rows = open_rows(name, kind, whole=options["whole"], media=media, **self._columns)
        if rows is not None and rows.embedded is not None and rows.pictured:
            rows.levels = options["levels"]
        if rows is not None or not (has_pictures(self.metrics) or self.kind == "audio"):
            return rows
        opened = open_dataset(name, kind, **options)
        return opened if isinstance(opened, SampleDataset) else None

    @property
    def _columns(self) -> dict[str, Any]:
        """The settings that choose the columns of a table; older runs have fewer."""
        names = ("column", "label_column", "labels")
        return {
            name: self.settings[name.upper()] for name in names if name.upper() in self.settings
        }

    def _origin(self, split: str) -> tuple[str, Literal["train", "test"], dict[str, Any]]:
        """Return name, split and options with which the data set of a split is opened."""
        added, other = self._extension(split), self.settings["DATASET_TEST"]
        name, whole = self.settings["DATASET"], False
        if added is not None:
            name = added["dataset"]
        elif split == "test" and other is not None:
            name, whole = other, True
        if name not in DATASETS:
            name = self._located(name, split)
        root = self._located(self.settings["DATA_DIR"], split)
        levels = Levels.from_dict(self.metrics["dataset"].get("levels"))
        options = {"root": root, "whole": whole, "levels": levels}
        return name, "test" if split == "test" else "train", options

    def _located(self, name: str, split: str) -> str:
        """Return a path of the settings, relative to the folder that the run was started in.

        If there is nothing any more, it is relative to the current folder.
        """
        started_in = (self._extension(split) or self.config).get("started_in")
        path = home_resolved(name)
        if started_in is None or path.is_absolute():
            return name
        return str(place) if (place := Path(started_in) / path).exists() else name

    def _find_places(self, split: str) -> NDArray[np.int64]:
        """Return the row in the data set of each sample of a split; -1 if it is not found.

        Raises:
            SourceChanged: the data set has changed, so that nothing of it is used.
        """
        data, names = self.rows(split), self.column("file", split).tolist()
        if data is None:
            return np.full(len(names), -1)
        if split in self._sources:
            return self._sources[split].find(data, names)
        self._check_fingerprint(split, data)
        return find_rows(names, data.ids)

    def _check_fingerprint(self, split: str, data: SampleDataset | Rows) -> None:
        """Raise SourceChanged unless the data set of an older run has the fingerprint it had."""
        opened: SampleDataset | FeatureDataset
        if isinstance(data, Rows):
            name, kind, options = self._origin(split)
            names = self.metrics["dataset"].get("class_names") if kind == "test" else None
            options |= self._columns | {"class_names": names and tuple(names)}
            opened = open_dataset(name, kind, **options)
        else:
            opened = data
        if opened.fingerprint != self.store(split).fingerprint.data:
            raise SourceChanged(
                f"{data.name} has changed since the run, so nothing of it is used: restore it"
            )

    @cached_property
    def file_digests(self) -> NDArray[np.object_]:
        """Digest of the file of each sample, `[n]`; None where there is none or it was not read."""
        digests = np.full(len(self), None)
        for split, rows in self.splits.items():
            if split in self._sources:
                digests[rows.start : rows.stop] = self._sources[split].digests
        return digests

    @cached_property
    def _sources(self) -> dict[str, Source]:
        """What the samples of each split were; empty for older runs."""
        return read_sources(self.path)

    def _split(self, name: str) -> range:
        if name not in self.splits:
            raise InputError(
                f"{self.path} has no split {name!r}; expected {', '.join(self.splits)}"
            )
        return self.splits[name]

    def _extension(self, split: str) -> dict[str, Any] | None:
        """Return the entry of an extension's split in `config.json`; None for other splits."""
        if not split.startswith("extend"):
            return None
        return self.config["extensions"][int(split.removeprefix("extend")) - 1]


def read_table(path: Path, columns: Collection[str] | None = None) -> arrow.Table:
    """Read columns of `assignments.csv` or `assignments.parquet`; None reads all columns."""
    needed = [name for name in NEEDED if columns is None or name in columns]
    try:
        if path.suffix == ".parquet":
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                table = file.read([name for name in names if columns is None or name in columns])
            plain = {"split": arrow.string(), "label": arrow.string()}  # not dictionaries
            fields = [(f.name, plain.get(f.name, f.type)) for f in table.schema]
            table = table.cast(arrow.schema(fields))
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
            f"{path} has no column {missing[0]}: the file was edited, or written by another "
            "version. Use another copy, or run again"
        )
    return table
