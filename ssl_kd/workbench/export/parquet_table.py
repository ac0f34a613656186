"""Export to Parquet: one row per sample, with all columns."""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from pyarrow import parquet

from ssl_kd.files import atomic_write
from ssl_kd.vision.assignments import ROWS_PER_GROUP
from ssl_kd.workbench.export.content import Content
from ssl_kd.workbench.output_files import refuse_existing

logger = logging.getLogger(__name__)

KEY = "ssl_kd.decisions"
LARGEST = 16 << 20  # characters, which the file stores twice; readers refuse 100 MB of metadata


def write_parquet(content: Content, out: Path) -> Path:
    """Write a Parquet file with the assignments and cluster names of the samples.

    The column `cluster` has the clusters after all decisions. If a decision changed a cluster, the
    column `cluster_of_run` has the original ones. The file's metadata has the decisions as JSON
    lines. Row groups are written one by one to save memory.
    """
    refuse_existing(out)
    batches = content.batches(ROWS_PER_GROUP)

    def write(file: BinaryIO) -> None:
        first = next(batches)
        schema = first.schema
        if len(content.decisions) > LARGEST:
            logger.warning("%s has no copy of the decisions: they are too long", out)
        elif content.decisions:
            schema = schema.with_metadata({KEY: content.decisions})
        with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            for batch in chain([first], batches):
                writer.write_batch(batch)
        refuse_existing(out)  # another process may have written it meanwhile

    atomic_write(out, write)
    return out
