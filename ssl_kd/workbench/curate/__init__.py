"""Cleaning what a store holds: copies, outliers, leaks, wrong labels; and what to label next."""

from ssl_kd.workbench.curate.duplicates import RULES, Duplicates, near_duplicates
from ssl_kd.workbench.curate.herding import label_next
from ssl_kd.workbench.curate.labels import mislabelled
from ssl_kd.workbench.curate.outliers import Leaks, leaks, outliers
from ssl_kd.workbench.curate.pictures import odd_images
from ssl_kd.workbench.curate.ranked import Ranked

__all__ = [
    "RULES",
    "Duplicates",
    "Leaks",
    "Ranked",
    "label_next",
    "leaks",
    "mislabelled",
    "near_duplicates",
    "odd_images",
    "outliers",
]
