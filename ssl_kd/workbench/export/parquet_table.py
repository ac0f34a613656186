"""Parquet: a row for each sample, with everything that is known about it."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import pyarrow as arrow
from pyarrow import parquet

from ssl_kd.files import atomic_write
from ssl_kd.vision.assignments import ROWS_PER_GROUP
from ssl_kd.workbench.export.content import Content
from ssl_kd.workbench.output_files import refuse_existing


def write_parquet(content: Content, out: Path) -> Path:
    """Write the columns of the run's assignments, names of every level, and added columns.

    `cluster` is the cluster after all decisions; where they changed any, `cluster_of_run` is the
    original one. Row groups are written one by one, so that memory stays small.

    Raises:
        InputError: `out` exists; OSError: it cannot be written, and nothing is left behind.
    """
    refuse_existing(out)
    batches = content.batches(ROWS_PER_GROUP)

    def write(file: BinaryIO) -> None:
        first = next(batches)
        with parquet.ParquetWriter(file, first.schema, compression="zstd") as writer:
            writer.write_batch(first)
            for batch in batches:
                writer.write_table(arrow.Table.from_batches([batch]).cast(first.schema))
        refuse_existing(out)  # another process may have written it meanwhile

    atomic_write(out, write)
    return out
