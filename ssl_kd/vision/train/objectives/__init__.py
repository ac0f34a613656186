"""Training objectives of the heads.

To add an objective to the library, write its class in a file beside these and add it to
`OBJECTIVES`. An objective in your own package needs no entry: `--loss
my_package.my_module.MyObjective`. torch is imported inside functions, so that `python train.py
--help` works without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ssl_kd.core.errors import InputError
from ssl_kd.core.settings.import_paths import import_class
from ssl_kd.vision.train.objectives.base import Objective, OfProbabilities
from ssl_kd.vision.train.objectives.iic import IIC
from ssl_kd.vision.train.objectives.scan import SCAN
from ssl_kd.vision.train.objectives.self_distillation import Fixed, Sharpened
from ssl_kd.vision.train.objectives.swav import SwAV
from ssl_kd.vision.train.objectives.temi import TEMI

__all__ = [
    "IIC",
    "OBJECTIVES",
    "SCAN",
    "TEMI",
    "Fixed",
    "Objective",
    "OfProbabilities",
    "Sharpened",
    "SwAV",
    "make_objective",
    "objective_class",
]

# LOSS -> the objective
OBJECTIVES: Mapping[str, type[Objective]] = MappingProxyType(
    {
        "temi": TEMI,
        "sharpened": Sharpened,
        "swav": SwAV,
        "scan": SCAN,
        "iic": IIC,
        "fixed": Fixed,
    }
)


def objective_class(name: str) -> type[Objective]:
    """Return the class of an objective, given a name in `OBJECTIVES` or an import path."""
    return OBJECTIVES.get(name) or import_class(name, Objective, "loss")


def make_objective(name: str, values: Mapping[str, Any]) -> Objective:
    """Create an objective, passing to its `__init__` those of the `values` that it accepts."""
    kind = objective_class(name)
    if lacking := ", ".join(sorted(getattr(kind, "__abstractmethods__", ()))):
        raise InputError(
            f"LOSS {name!r} does not define {lacking}, which every objective does: add them. "
            "OfProbabilities of this package defines all but loss"
        )
    parameters = inspect.signature(kind).parameters
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in values]
    if missing:
        raise InputError(
            f"LOSS is {name!r}, whose __init__ needs {', '.join(missing)}, but there is no such "
            "setting: give the argument a default"
        )
    return kind(**{option: values[option] for option in parameters if option in values})
