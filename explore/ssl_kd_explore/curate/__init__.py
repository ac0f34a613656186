"""Find duplicates, outliers, leaks, wrong labels and broken images among samples."""

from ssl_kd_explore.curate.duplicates import Duplicates, near_duplicates
from ssl_kd_explore.curate.image_checks import odd_images
from ssl_kd_explore.curate.outliers import leaks, outliers
from ssl_kd_explore.curate.ranked_samples import Ranked
from ssl_kd_explore.curate.wrong_labels import mislabeled

__all__ = [
    "Duplicates",
    "Ranked",
    "leaks",
    "mislabeled",
    "near_duplicates",
    "odd_images",
    "outliers",
]
