"""Clustering heads, under the path that users import: `HEAD = "ssl_kd.heads.TEMIHead"`."""

from ssl_kd.vision.train.heads import (
    OWN_HEADS,
    HeadBank,
    TEMIHead,
    check_answer,
    head_maker,
    import_head,
    parameters_of,
)

__all__ = [
    "OWN_HEADS",
    "HeadBank",
    "TEMIHead",
    "check_answer",
    "head_maker",
    "import_head",
    "parameters_of",
]
