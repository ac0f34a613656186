"""Store the tokens of all patches of images as a table, for dense tasks such as segmentation."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as arrow
from pyarrow import parquet
from torch import Tensor

from ssl_kd.core.errors import InputError, brief
from ssl_kd.core.files import CorruptFileError, atomic_write
from ssl_kd.core.precision import default_torch_state
from ssl_kd.core.shards import Fingerprint
from ssl_kd.core.shards.fingerprint import FingerprintMismatch
from ssl_kd.core.shards.writer import SHARD_BYTES
from ssl_kd.vision.data import FileFolder
from ssl_kd.vision.data.tables import ROOT
from ssl_kd.vision.data.usage import counted
from ssl_kd.vision.extract import SplitExtraction, check_finite, fingerprint, logger

_FINGERPRINT = b"ssl_kd.fingerprint"


@dataclasses.dataclass(frozen=True)
class PatchExtraction(SplitExtraction):
    """Embed the patches of the images of one split, and store them as Parquet files.

    The files are a data set of features with a row for each patch: `train.py --dataset FOLDER`
    clusters the patches. The columns are `id` (unique), `image` (the name of the image in its data
    set), `patch_row` and `patch_column` (position in the teacher's grid, from 0 at the top left of
    its input) and `features`, float32 `[dim]`. Rows are in the order of the images, and row by row
    in each. There are no labels, since those of an image are not those of its patches.

    Each file has the patches of `shard_rows` images, and appears when it is complete. An
    interrupted extraction continues with the files that are missing. An unreadable image is left
    out, with a warning.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher.grid is None:
            raise InputError(
                f"TOKEN is 'patches', but TEACHER {self.teacher.name!r} has no patch tokens: choose"
                " a vision transformer, such as --teacher dinov2"
            )

    @property
    def file(self) -> Path:
        """The first file of the table."""
        return self._files[0]

    @default_torch_state()
    def fill(self, rank: int = 0, world: int = 1) -> str:
        """Write the missing files as one of `world` processes; describe the table in one line."""
        self._check_number()
        missing = [
            number
            for number in range(len(self._files))[rank::world]
            if self.force or not self._is_stored(self._files[number])
        ]
        n = len(self.dataset)
        rows = [range(n)[i * self._size : (i + 1) * self._size] for i in missing]
        done, total = 0, sum(map(len, rows))
        for number, images in zip(missing, rows, strict=True):
            for batch in self._write(self._files[number], images):
                done += batch
                self.progress("extract", done, total, {})
        stored = [parquet.read_metadata(file) for file in self._files if file.is_file()]
        if len(stored) < len(self._files):
            return (
                f"{len(stored)} of {len(self._files)} files are stored; the others are those of "
                "other processes"
            )
        n_rows = sum(metadata.num_rows for metadata in stored)
        if not n_rows:
            raise InputError(
                f"not one of the {n} images of DATASET {self.dataset.name} is readable"
            )
        height, width = self._grid
        return (
            f"{n_rows} patches of {self.teacher.dim}, {height} x {width} of each image, in "
            f"{counted(len(stored), 'file')}; cluster them with --dataset {self.folder}"
        )

    @property
    def _grid(self) -> tuple[int, int]:
        assert self.teacher.grid is not None  # checked when the extraction was made
        return self.teacher.grid

    @cached_property
    def _size(self) -> int:
        """Images in a file."""
        height, width = self._grid
        return self.shard_rows or max(1, SHARD_BYTES // (4 * height * width * self.teacher.dim))

    @cached_property
    def _files(self) -> list[Path]:
        total = -(-len(self.dataset) // self._size)
        names = (f"{self.split}-{number:05}-of-{total:05}.parquet" for number in range(total))
        return [Path(self.folder) / name for name in names]

    @cached_property
    def _identity(self) -> Fingerprint:
        return fingerprint(self.dataset, self.teacher, self.precision)

    @cached_property
    def _schema(self) -> arrow.Schema:
        columns = {
            "id": arrow.string(),
            "image": arrow.string(),
            "patch_row": arrow.int32(),
            "patch_column": arrow.int32(),
            "features": arrow.list_(arrow.float32(), self.teacher.dim),
        }
        metadata: dict[bytes, bytes] = {_FINGERPRINT: json.dumps(vars(self._identity)).encode()}
        if isinstance(self.dataset, FileFolder):  # the names of its images are their paths
            metadata[ROOT.encode()] = os.fsencode(self.dataset.root.resolve())
        return arrow.schema(columns, metadata)

    def _check_number(self) -> None:
        """Raise InputError if the folder has files of another number of images."""
        others = {*Path(self.folder).glob(f"{self.split}-*-of-*.parquet")} - {*self._files}
        if others:
            raise InputError(
                f"{min(others)} is of a table with another number of files than "
                f"{len(self._files)}: use the --shard_rows that it was written with, or remove the "
                f"files of {self.folder}"
            )

    def _is_stored(self, file: Path) -> bool:
        """Return whether a file is complete; raise if it is damaged or holds something else."""
        try:
            metadata = parquet.read_schema(file).metadata or {}
            stored = Fingerprint(**json.loads(metadata[_FINGERPRINT]))
        except FileNotFoundError:
            return False
        except (arrow.ArrowException, KeyError, TypeError, ValueError) as error:
            if self.rebuild:
                logger.warning("%s is written again: it is damaged (%s)", file, brief(error))
                return False
            raise CorruptFileError(
                f"{file} is damaged ({brief(error)}): --rebuild_damaged writes it again"
            ) from error
        if differences := stored.differences(self._identity):
            raise FingerprintMismatch(file, differences, Fingerprint.way_out)
        return True

    def _write(self, file: Path, images: range) -> Iterator[int]:
        """Write the patches of some images; yield the number of images after each batch."""
        starts = range(images.start, images.stop, self.batch_size)
        batches = [range(at, min(at + self.batch_size, images.stop)) for at in starts]
        tables = []
        with self.loaded(batches) as (embed, decoded):
            for batch in decoded:
                for _, problem in batch.unreadable:
                    logger.warning("unreadable image left out: %s", problem)
                if batch.samples is not None:
                    tokens = embed(batch.samples)
                    check_finite(tokens, batch.rows, self.dataset, self.teacher)
                    tables.append(self._table(batch.rows, tokens.cpu()))
                yield len(batch.rows) + len(batch.unreadable)

        def write(target: BinaryIO) -> None:
            parquet.write_table(arrow.concat_tables([self._schema.empty_table(), *tables]), target)

        atomic_write(file, write)

    def _table(self, images: Any, tokens: Tensor) -> arrow.Table:
        """Return the rows of some images, from their tokens `[image, patch, dim]`."""
        height, width = self._grid
        names = [self.dataset.ids[image] for image in images]
        y, x = np.divmod(np.arange(height * width, dtype=np.int32), np.int32(width))
        columns = [
            [f"{name}#{row},{column}" for name in names for row, column in zip(y, x, strict=True)],
            np.repeat(np.array(names, dtype=object), height * width),
            np.tile(y, len(names)),
            np.tile(x, len(names)),
            arrow.FixedSizeListArray.from_arrays(tokens.flatten().numpy(), self.teacher.dim),
        ]
        return arrow.table(columns, schema=self._schema)
