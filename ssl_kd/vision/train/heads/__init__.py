"""Clustering heads on frozen embeddings, and a bank that runs many heads in one batch."""

from ssl_kd.vision.train.heads.bank import (
    OWN_HEADS,
    HeadBank,
    check_answer,
    head_maker,
    import_head,
    parameters_of,
)
from ssl_kd.vision.train.heads.dino import DINOHead
from ssl_kd.vision.train.heads.temi import TEMIHead

__all__ = [
    "OWN_HEADS",
    "DINOHead",
    "HeadBank",
    "TEMIHead",
    "check_answer",
    "head_maker",
    "import_head",
    "parameters_of",
]
