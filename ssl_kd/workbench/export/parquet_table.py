"""Export to Parquet: one row per sample, with all columns."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import BinaryIO

from pyarrow import parquet

from ssl_kd.files import atomic_write
from ssl_kd.vision.assignments import ROWS_PER_GROUP
from ssl_kd.workbench.export.content import Content
from ssl_kd.workbench.output_files import refuse_existing


def write_parquet(content: Content, out: Path) -> Path:
    """Write a Parquet file with the assignments and cluster names of the samples.

    The column `cluster` has the clusters after all decisions. If a decision changed a cluster, the
    column `cluster_of_run` has the original ones. Row groups are written one by one to save memory.
    """
    refuse_existing(out)
    batches = content.batches(ROWS_PER_GROUP)

    def write(file: BinaryIO) -> None:
        first = next(batches)
        with parquet.ParquetWriter(file, first.schema, compression="zstd") as writer:
            for batch in chain([first], batches):
                writer.write_batch(batch)
        refuse_existing(out)  # another process may have written it meanwhile

    atomic_write(out, write)
    return out
