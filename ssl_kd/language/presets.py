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
        "alpha_attention": 0.0,
        "schedule": None,
        "legacy_clamp": None,
        "on_policy": 0.0,
        "rollout_engine": "transformers",
        "divergence": "auto",
    }
)
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Small steps, little of the teacher: what the older scripts called stable.
        "stable": {
            "learning_rate": 1e-5,
            "temperature": 2.0,
            "alpha_kd": 0.1,
            "alpha_ce": 0.9,
            "clip_grad": 0.5,
            "batch_size": 1,
            "block_size": 512,
            "router_mode": "auto",
        },
        # For cards without bf16: half-precision products, float32 weights and losses.
        "fp16_safe": {
            "learning_rate": 5e-6,
            "temperature": 1.5,
            "alpha_kd": 0.05,
            "alpha_ce": 0.95,
            "clip_grad": 0.5,
            "batch_size": 1,
            "block_size": 512,
            "router_mode": "auto",
            "model_dtype": "float16",
        },
        # Goes back and begins again where the others stop.
        "ultra_stable": {
            "learning_rate": 5e-6,
            "temperature": 1.5,
            "alpha_kd": 0.05,
            "alpha_ce": 0.95,
            "clip_grad": 0.5,
            "batch_size": 1,
            "block_size": 512,
            "router_mode": "auto",
            "stop_after": None,
            "teacher_offload": True,
            "gradient_checkpointing": True,
        },
        "most_conservative": {
            "learning_rate": 2e-6,
            "temperature": 1.2,
            "alpha_kd": 0.01,
            "alpha_ce": 0.99,
            "clip_grad": 0.25,
            "batch_size": 1,
            "block_size": 512,
            "router_mode": "auto",
            "stop_after": None,
        },
        "balanced": {
            "learning_rate": 1e-5,
            "temperature": 2.0,
            "alpha_kd": 0.1,
            "alpha_ce": 0.9,
            "clip_grad": 0.5,
        },
    }
)
