"""Self-supervised knowledge distillation: students learn from a frozen teacher."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

# Idle OpenMP threads sleep instead of spinning: as fast on an idle machine, and several times
# faster on a shared one. torch reads this when it is imported; a value that is set is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from ssl_kd.language.distillation import Distillation
    from ssl_kd.sweep.records import runs
    from ssl_kd.vision.estimator import MultiHeadClusterer
    from ssl_kd_explore.run import Run

__all__ = ["Distillation", "MultiHeadClusterer", "Run", "__version__", "runs"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Imported on first use: torch and scikit-learn take seconds, and `ssl_kd --help` needs neither.
    homes = {
        "Distillation": "ssl_kd.language.distillation",
        "MultiHeadClusterer": "ssl_kd.vision.estimator",
        "runs": "ssl_kd.sweep.records",
    }
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    if name == "Run":
        from ssl_kd.core import explorer

        return explorer.load("objects", name, "ssl_kd.Run")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
