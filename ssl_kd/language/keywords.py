"""The settings of `scripts/config.py` as keyword arguments, each with its type.

Written by `python -m tests.language.keywords`; meaning and range are those of `LanguageSettings`.
"""

from __future__ import annotations

from typing import Literal, TypedDict


class Keywords(TypedDict, total=False):
    """What `Distillation` takes beside teacher, student and texts."""

    align: Literal["auto", "hidden", "uld", "chunks"]
    alpha_attention: float
    alpha_ce: float
    alpha_hidden: float
    alpha_kd: float
    answer_prompts: int
    attn_implementation: Literal["eager", "sdpa", "flex_attention"] | None
    baseline: bool
    batch_size: int
    block_size: int
    cache_k: int
    cache_method: Literal["sample", "topk", "hidden"]
    checkpoint_every: int
    clip_grad: float | None
    device: str
    divergence: str
    dry_run: bool
    epochs: float | None
    eval_every: int
    eval_rows: int
    force_recompute: bool
    generations: int
    grad_norm_threshold: float | None
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    ka_lambda: float
    layer_map: str
    learning_rate: float | None
    legacy_clamp: str | None
    log_every: int
    lora_alpha: float
    lora_merge: bool
    lora_quantization: Literal["nf4"] | None
    lora_rank: int
    loss_mean: Literal["tokens", "sequences"]
    lr_schedule: Literal["cosine", "linear", "constant_with_warmup", "constant"]
    max_megabytes: float | None
    max_new_tokens: int
    max_steps: int
    model_dtype: Literal["auto", "float32", "bfloat16", "float16"]
    on_policy: float
    packing: bool
    patience: int | None
    prompt_tokens: int
    rebuild_damaged: bool
    report_to: Literal["none", "tensorboard", "wandb", "trackio"]
    restore_after: int
    resume: bool
    rollout_temperature: float
    rollout_tokens: int
    rollout_top_p: float
    router_beta: float
    router_drift: float
    router_lr: float
    router_mode: Literal["native", "all", "ka", "sar", "auto"]
    router_weights: str | None
    run_name: str | None
    runs_dir: str
    save_dtype: Literal["float32", "bfloat16", "float16"]
    schedule: str | None
    seed: int
    shard: bool
    spike_factor: float
    stop_after: int | None
    teacher_cache: str | None
    teacher_offload: bool
    teacher_quantization: Literal["nf4"] | None
    teacher_served_as: str | None
    teacher_size: str
    teacher_steps: int
    teacher_text: float
    teacher_top_k: int
    teacher_url: str | None
    teacher_weights: str | None
    temperature: float
    text_field: str | None
    train_vision: bool
    trust_remote_code: bool
    warmup_fraction: float
    weight_decay: float
