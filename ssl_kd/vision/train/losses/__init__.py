"""Losses of heads as pure functions of tensors; half-precision inputs are computed in float32."""

from ssl_kd.vision.train.losses.mutual_information import (
    InstanceWeight,
    agreement,
    beta_mi,
    instance_weights,
    log_probabilities,
    safe_normalize_weights,
    temi,
)
from ssl_kd.vision.train.losses.self_distillation import centered_targets, sharpened_cross_entropy

__all__ = [
    "InstanceWeight",
    "agreement",
    "beta_mi",
    "centered_targets",
    "instance_weights",
    "log_probabilities",
    "safe_normalize_weights",
    "sharpened_cross_entropy",
    "temi",
]
