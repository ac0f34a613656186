"""The guard under its former name: it is a distribution of its own now, `firstnan`."""

import importlib
import sys

from firstnan import *
from ssl_kd.core.precision import DeviceInfo, Precision, UnsupportedDevice, promote_to_fp32
from ssl_kd.losses import safe_normalize_weights

_FORMER = "diagnosis events faults finite loop microscope parts script watch".split()
for _name, _home in (dict.fromkeys(_FORMER, "firstnan") | {"precision": "ssl_kd.core"}).items():
    _module = importlib.import_module(f"{_home}.{_name}")
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _module
