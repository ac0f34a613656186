"""The choice of dtypes for a device, under the path that users import."""

from ssl_kd.core.precision import (
    DeviceInfo,
    Precision,
    UnsupportedDevice,
    default_torch_state,
    promote_to_fp32,
)

__all__ = [
    "DeviceInfo",
    "Precision",
    "UnsupportedDevice",
    "default_torch_state",
    "promote_to_fp32",
]
