"""The presets of the language mode: a few lines of data each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Cross-entropy alone, whatever a run learns from beside it.
TEXT_ALONE: Mapping[str, Any] = MappingProxyType(
    {
        "alpha_ce": 1.0,
        "alpha_kd": 0.0,
        "alpha_hidden": 0.0,
        "schedule": None,
        "legacy_clamp": None,
        "on_policy": 0.0,
        "divergence": "auto",
    }
)
# What the older scripts have in common.
_OLDER: Mapping[str, Any] = {
    "clip_grad": 0.5,
    "batch_size": 1,
    "block_size": 512,
    "router_mode": "auto",
    "eval_every": 50,
}
# Small steps, little of the teacher.
_STABLE = {**_OLDER, "learning_rate": 1e-5, "temperature": 2.0, "alpha_kd": 0.1, "alpha_ce": 0.9}
_SAFE = {**_OLDER, "learning_rate": 5e-6, "temperature": 1.5, "alpha_kd": 0.05, "alpha_ce": 0.95}
# Where others stop, go back to the last good state and begin again; and save memory.
_PATIENT = {"stop_after": None, "teacher_offload": True, "gradient_checkpointing": True}
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "stable": _STABLE,
        # For cards without bf16: half-precision products, float32 weights and losses.
        "fp16_safe": {**_SAFE, "model_dtype": "float16"},
        "ultra_stable": {**_SAFE, **_PATIENT},
        "most_conservative": {
            **_OLDER,
            **_PATIENT,
            "learning_rate": 2e-6,
            "temperature": 1.2,
            "alpha_kd": 0.01,
            "alpha_ce": 0.99,
            "clip_grad": 0.25,
            "max_steps": 1000,
        },
        "balanced": {**_STABLE, "model_dtype": "float16"},
    }
)
NOTES: Mapping[str, str] = dict.fromkeys(
    PRESETS,
    "unlike the older script it does not clamp logits (--legacy_clamp 2.5 does), and a step is"
    " skipped by --spike_factor, not by a bound on its gradient norm (--grad_norm_threshold 2.0)",
)
"""What a preset does otherwise than the script that it is called after, on purpose."""
