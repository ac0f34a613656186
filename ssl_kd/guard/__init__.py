"""The guard under its former name: it is a distribution of its own now, `firstnan`."""

import importlib
import sys

from firstnan import *  # noqa: F403
from firstnan import __all__ as __all__

_MODULES = "diagnosis events faults finite loop microscope parts precision script watch"
for _name in _MODULES.split():
    _module = importlib.import_module(f"firstnan.{_name}")
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _module
