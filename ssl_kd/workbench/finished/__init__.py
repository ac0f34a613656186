"""A finished clustering run, opened again: its samples, and what people decided about them."""

from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.finished.curation import Curation, Decision
from ssl_kd.workbench.finished.named import name_samples

__all__ = ["Curation", "Decision", "Samples", "name_samples"]
