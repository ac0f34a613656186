"""The presets of the language mode: a few lines of data each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Shared by the older scripts.
_OLDER: Mapping[str, Any] = {
    "clip_grad": 0.5,
    "batch_size": 1,
    "block_size": 512,
    "router_mode": "auto",
    "eval_every": 50,
}
_STABLE = {**_OLDER, "learning_rate": 1e-5, "temperature": 2.0, "alpha_kd": 0.1, "alpha_ce": 0.9}
_SAFE = {**_OLDER, "learning_rate": 5e-6, "temperature": 1.5, "alpha_kd": 0.05, "alpha_ce": 0.95}
# Restore the student instead of stopping, and save memory.
_PATIENT = {"stop_after": None, "gradient_checkpointing": True}
# One card of 16 GB without bfloat16: adapters, and a teacher that has answered before training.
_OLD_CARD = {
    "model_dtype": "float16",
    "lora_rank": 16,
    "lora_alpha": 32.0,
    "teacher_cache": "auto",
    "quantization": "nf4:teacher",
    "gradient_checkpointing": True,
    "batch_size": 1,
    "gradient_accumulation_steps": 16,
    "block_size": 2048,
}
# `make distill`: SmolLM2-135M, with a third of its layers as the student, in about a quarter of an
# hour on two cores. At first the layers that remain do not fit together, which many small steps
# mend sooner than few large ones.
_SMOLLM2 = {
    "teacher_model": "smollm2",
    "teacher_cache": "auto",
    "cache_method": "hidden",
    "student_model": "layers:10",
    "model_dtype": "bfloat16",
    "train_rows": 512,
    "batch_size": 4,
    "max_steps": 256,
    "eval_rows": 64,
    "eval_every": 64,
    "generations": 3,
    "max_new_tokens": 48,
}
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "smollm2": _SMOLLM2,
        # The defaults: a small teacher is trained first, and nothing is downloaded.
        "small": {"teacher_model": "train", "student_model": "fresh:2x128"},
        "stable": _STABLE,
        # For GPUs without bfloat16: float16 products, float32 weights and losses.
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
        "t4": _OLD_CARD,
        "p100": _OLD_CARD,  # which computes float16 at the rate of float32, in half the memory
    }
)
# How a preset deliberately differs from the script it is named after.
NOTES: Mapping[str, str] = dict.fromkeys(
    ("stable", "fp16_safe", "ultra_stable", "most_conservative", "balanced"),
    "unlike the older script, it does not clamp logits (--legacy_clamp 2.5 does), and it skips a"
    " step by --spike_factor instead of a bound on the gradient norm (--grad_norm_threshold 2.0)",
)
