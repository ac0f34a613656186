"""Losses as pure functions of tensors; half-precision inputs are computed in float32."""

from ssl_kd.divergences import DIVERGENCES
from ssl_kd.losses.legacy_clamp import LegacyClamp
from ssl_kd.losses.mutual_information import (
    InstanceWeight,
    agreement,
    beta_mi,
    instance_weights,
    log_probabilities,
    safe_normalize_weights,
    temi,
)
from ssl_kd.losses.self_distillation import centered_targets, sharpened_cross_entropy
from ssl_kd.losses.teacher_output import (
    LinearTeacher,
    LogitsTeacher,
    SampledTeacher,
    TeacherOutput,
    TopKTeacher,
)
from ssl_kd.losses.token_distillation import (
    linear_distillation,
    logits_distillation,
    next_token_targets,
    token_kd,
)

__all__ = [
    "DIVERGENCES",
    "InstanceWeight",
    "LegacyClamp",
    "LinearTeacher",
    "LogitsTeacher",
    "SampledTeacher",
    "TeacherOutput",
    "TopKTeacher",
    "agreement",
    "beta_mi",
    "centered_targets",
    "instance_weights",
    "linear_distillation",
    "log_probabilities",
    "logits_distillation",
    "next_token_targets",
    "safe_normalize_weights",
    "sharpened_cross_entropy",
    "temi",
    "token_kd",
]
