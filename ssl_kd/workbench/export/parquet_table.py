"""Export to Parquet: one row per sample, with all columns."""

from __future__ import annotations

import logging
from typing import BinaryIO

from pyarrow import parquet

from ssl_kd.vision.assignments import ROWS_PER_GROUP
from ssl_kd.workbench.export.content import Content

logger = logging.getLogger(__name__)

KEY = "ssl_kd.decisions"
LARGEST = 16 << 20  # characters, which the file stores twice; readers refuse 100 MB of metadata


def write_parquet(content: Content, file: BinaryIO) -> None:
    """Write the samples with all columns, and the decisions as JSON lines in the metadata."""
    table = content.table
    if len(content.decisions) > LARGEST:
        logger.warning("the Parquet file has no copy of the decisions: they are too long")
    elif content.decisions:
        table = table.replace_schema_metadata({KEY: content.decisions})
    parquet.write_table(table, file, ROWS_PER_GROUP, compression="zstd")
