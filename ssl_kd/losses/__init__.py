"""Losses: pure functions, tensors in, one value per sample or part out, float32 inside."""

from ssl_kd.guard.finite import safe_normalize_weights
from ssl_kd.losses.mutual_information import (
    InstanceWeight,
    agreement,
    beta_mi,
    instance_weights,
    log_probabilities,
    temi,
)
from ssl_kd.losses.self_distillation import (
    centred_targets,
    sharpened_cross_entropy,
    sinkhorn_targets,
)

__all__ = [
    "InstanceWeight",
    "agreement",
    "beta_mi",
    "centred_targets",
    "instance_weights",
    "log_probabilities",
    "safe_normalize_weights",
    "sharpened_cross_entropy",
    "sinkhorn_targets",
    "temi",
]
