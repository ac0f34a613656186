"""Names of settings: older ones, those of other trainers, and those that may change."""

from __future__ import annotations

from collections.abc import Mapping

from ssl_kd.settings import RunSettings

GIVEN = "given"
"""TEACHER_MODEL and STUDENT_MODEL of a model that was handed over in memory."""

# What the settings were called up to version 0.1, and in transformers' TrainingArguments.
ALIASES: Mapping[str, str] = {
    **RunSettings.aliases,
    "eval_steps": "eval_every",
    "lmbda": "on_policy",
    "max_length": "block_size",
    "max_seq_length": "block_size",
    "per_device_batch_size": "batch_size",
    "student_lr": "learning_rate",
    "train_steps": "max_steps",
}
INSTEAD: Mapping[str, str] = {
    **{name: way for name, way in RunSettings.instead.items() if name != "report_to"},
    **dict.fromkeys(("bf16", "bf16_full_eval"), "Use --model_dtype bfloat16."),
    **dict.fromkeys(("fp16", "fp16_full_eval"), "Use --model_dtype float16."),
    **dict.fromkeys(
        (
            "activation_checkpointing",
            "activation_checkpointing_kwargs",
            "gradient_checkpointing_kwargs",
        ),
        "Use --gradient_checkpointing.",
    ),
    **dict.fromkeys(
        ("eval_delay", "eval_on_start", "eval_strategy", "evaluation_strategy"),
        "Use --eval_every.",
    ),
    **dict.fromkeys(
        ("eval_accumulation_steps", "per_device_eval_batch_size"),
        "Evaluation takes --batch_size rows at once, --eval_rows in all.",
    ),
    **dict.fromkeys(("data", "dataset", "dataset_name"), "Use --data_path."),
    **dict.fromkeys(("fsdp", "fsdp_config"), "Start it by torchrun, with --shard."),
    **dict.fromkeys(
        ("ddp_backend", "ddp_timeout", "deepspeed", "local_rank"),
        "Start it by torchrun: its processes train one student.",
    ),
    **dict.fromkeys(
        ("model", "model_name", "model_name_or_path"),
        "Use --student_model, and --teacher_model for the teacher.",
    ),
    "beta": "Use --divergence js:BETA; forward_kl and reverse_kl are what 0 and 1 stand for.",
    "max_completion_length": "Use --rollout_tokens.",
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "use_bnb_nested_quant"),
        "Use --lora_quantization nf4, and --teacher_quantization nf4 for the teacher.",
    ),
    "seq_kd": "Use --teacher_text 1.",
    "alpha": "Use --alpha_kd for the teacher's share and --alpha_ce for the text's.",
    "load_best_model_at_end": "The student of the best evaluation is saved anyway.",
    "torch_empty_cache_steps": "Use --clear_cache_every_step.",
    "use_vllm": "Use --rollout_engine vllm.",
}

FREE_ON_RESUME = RunSettings.free_on_resume | {
    "checkpoint_every",
    "clear_cache_every_step",
    "force_recompute",
    "log_every",
    "rebuild_damaged",
    "rollout_memory",
    "shard",
    "teacher_offload",
    "teacher_patience",
    "teacher_timeout",
    "teacher_url",
    "report_to",
    "tensorboard",
}
"""Those that may differ between a run and its continuation."""

HEADING = """\
The settings of `python scripts/distill.py`: plain literals, read and never executed.

A preset beats the value here, and a flag of the same name beats both: `--learning_rate 1e-5` or
`--learning-rate 1e-5`. `python scripts/distill.py --help` says what each may be and lists the
presets; a name or value that cannot be is refused.
"""
