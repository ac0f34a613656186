"""Export to Parquet: one row per sample, with all columns."""

from __future__ import annotations

import logging
from typing import BinaryIO

from pyarrow import parquet

from ssl_kd.vision.assignments import ROWS_PER_GROUP
from ssl_kd_explore.export.content import Content

logger = logging.getLogger(__name__)

KEY = "ssl_kd.decisions"
LARGEST = 16 << 20  # characters, which the file stores twice; readers refuse 100 MB of metadata


def write_parquet(content: Content, file: BinaryIO, *, with_root: bool = True) -> None:
    """Write the samples with all columns, and the decisions as JSON lines in the metadata.

    `with_root` adds the folder of relative paths, which is one of this machine.
    """
    table = content.table if with_root else content.table.replace_schema_metadata(None)
    if len(content.decisions) > LARGEST:
        logger.warning("the Parquet file has no copy of the decisions: they are too long")
    elif content.decisions:
        metadata = {**(table.schema.metadata or {}), KEY: content.decisions}
        table = table.replace_schema_metadata(metadata)
    parquet.write_table(table, file, ROWS_PER_GROUP, compression="zstd")
