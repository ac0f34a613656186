"""The losses of both products, under the path that users import; pure functions of tensors."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from ssl_kd.language.losses.divergences import DIVERGENCES
    from ssl_kd.language.losses.legacy_clamp import LegacyClamp
    from ssl_kd.language.losses.teacher_output import (
        LinearTeacher,
        LogitsTeacher,
        SampledTeacher,
        TeacherOutput,
        TopKTeacher,
    )
    from ssl_kd.language.losses.token_distillation import (
        linear_distillation,
        logits_distillation,
        next_token_targets,
        token_kd,
    )

_OF_LANGUAGE_MODELS = {  # imported on first use, so that clustering needs none of them
    "DIVERGENCES": "divergences",
    "LegacyClamp": "legacy_clamp",
    "LinearTeacher": "teacher_output",
    "LogitsTeacher": "teacher_output",
    "SampledTeacher": "teacher_output",
    "TeacherOutput": "teacher_output",
    "TopKTeacher": "teacher_output",
    "linear_distillation": "token_distillation",
    "logits_distillation": "token_distillation",
    "next_token_targets": "token_distillation",
    "token_kd": "token_distillation",
}

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


def __getattr__(name: str) -> object:
    if name in _OF_LANGUAGE_MODELS:
        home = f"ssl_kd.language.losses.{_OF_LANGUAGE_MODELS[name]}"
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
