"""Heads: students of frozen embeddings, and the bank that runs many of them as one."""

from ssl_kd.heads.bank import (
    OWN_HEADS,
    HeadBank,
    check_answer,
    head_maker,
    import_head,
    parameters_of,
)
from ssl_kd.heads.temi import TEMIHead

__all__ = [
    "OWN_HEADS",
    "HeadBank",
    "TEMIHead",
    "check_answer",
    "head_maker",
    "import_head",
    "parameters_of",
]
