"""A finished clustering run, opened again: its samples, and what people decided about them."""

from ssl_kd.workbench.finished.curation import Curation, Decision
from ssl_kd.workbench.finished.named import name_samples
from ssl_kd.workbench.finished.samples import Samples

__all__ = ["Curation", "Decision", "Samples", "name_samples"]
