"""Map setting names of older scripts and other trainers to the settings of the language mode."""

from __future__ import annotations

from collections.abc import Mapping

from ssl_kd.core.settings import RunSettings
from ssl_kd.core.settings.foreign_names import by_name

IN_MEMORY = "given"  # TEACHER_MODEL and STUDENT_MODEL of a model that is passed in memory

# Names of older scripts, and of transformers' TrainingArguments and TRL where they mean the same in
# the same unit.
ALIASES: Mapping[str, str] = {
    **RunSettings.aliases,
    "dataset_text_field": "text_field",
    "eval_steps": "eval_every",
    "lmbda": "on_policy",
    "kd_alpha": "alpha_kd",
    "kd_ce_alpha": "alpha_ce",
    "kd_temperature": "temperature",
    "logit_clamp": "legacy_clamp",
    "lora_r": "lora_rank",
    "lr_scheduler_type": "lr_schedule",
    "max_completion_length": "max_new_tokens",
    "max_consecutive_nans": "stop_after",
    "max_length": "block_size",
    "max_seq_length": "block_size",
    "micro_batch_size": "batch_size",
    "num_epochs": "epochs",
    "per_device_batch_size": "batch_size",
    "sample_packing": "packing",
    "sequence_len": "block_size",
    "student_lr": "learning_rate",
    "target_modules": "lora_target_modules",
    "teacher_model_name_or_path": "teacher_model",
    "train_steps": "max_steps",
    "vllm_server_base_url": "rollout_url",
}
PER_PROCESS = frozenset(
    {"micro_batch_size", "per_device_train_batch_size", "per_device_batch_size"}
)
"""Aliases of BATCH_SIZE that count the rows of one process instead of all processes."""

# Arguments of transformers, and the best known ones of TRL, that have another name or form here.
_OTHERS: Mapping[str, str] = {
    "Use --model_dtype for the products; weights are trained and saved in float32.": """
        dtype torch_dtype""",
    "Use --model_dtype bfloat16.": "bf16 bf16_full_eval",
    "Use --model_dtype float16.": "fp16 fp16_full_eval",
    "Float32 products stay float32; use --model_dtype bfloat16 for faster ones.": "tf32",
    "Use --report_to.": "logging_dir project tensorboard trackio_*",
    "Use --gradient_checkpointing.": "activation_* gradient_checkpointing_kwargs",
    "Use --eval_every.": "eval_delay eval_on_start eval_strategy evaluation_strategy",
    "Evaluation takes --batch_size rows at once, --eval_rows in all.": """
        eval_accumulation_steps per_device_eval_batch_size""",
    "The student with the best held-out likelihood is saved, see --eval_every.": """
        greater_is_better load_best_model_at_end metric_for_best_model""",
    "Use --data_path, and --eval_path for held-out text.": """
        data dataloader_* dataset dataset_* datasets length_column_name remove_unused_columns""",
    "Start it by torchrun: its processes train one student, with a copy on each GPU. For models"
    " that do not fit on one, use --teacher_url or --teacher_cache, and --lora_rank with"
    " --quantization nf4.": "ddp_* deepspeed fsdp fsdp_config local_rank shard",
    "Use --student_model, and --teacher_model for the teacher.": """
        model model_name model_name_or_path""",
    "Use --teacher_model self: with --lora_rank the base model, else the live student.": """
        teacher_model_kind""",
    "Use --teacher_url http://HOST:PORT/v1.": "teacher_model_server_url teacher_server_urls",
    "Use --divergence js:BETA, or forward_kl and reverse_kl for BETA 0 and 1.": "beta",
    "Use --alpha_kd for the teacher's share and --alpha_ce for the text's.": "alpha kd_ratio",
    "Use --align uld (or chunks), and --alpha_kd.": "uld_* use_extended_uld use_uld_loss",
    "Use --lora_rank above 0.": "peft use_lora use_peft",
    "In chats only the assistant's turns have loss, and in prompts with a completion only the"
    " completion: --dry_run shows it.": "assistant_only_loss completion_only_loss train_on_inputs",
    "Use --packing, which pads nothing and keeps documents apart; --packing False pads each row to"
    " the longest of its batch.": "group_by_length padding_free",
    "Adapters are set by --lora_rank, --lora_alpha, --lora_dropout, --lora_target_modules,"
    " --modules_to_save, --use_rslora and --use_dora.": """
        ensure_weight_tying init_lora_weights lora_*""",
    "Use --quantization nf4.": "bnb_* load_in_4bit load_in_8bit",
    "Use --teacher_text 1.": "seq_kd",
    "Use --rollout_url http://HOST:PORT of vllm serve (not trl vllm-serve).": """
        rollout_engine rollout_memory use_vllm vllm_*""",
    "Use --clear_cache_every_step.": "torch_empty_cache_steps",
    "The logits of a batch are never stored; for less memory use --gradient_checkpointing.": """
        liger_kernel_config use_cache use_liger_kernel""",
    "Not supported here; use ssl_kd.hf_trainer.DistillationTrainer.": """
        torch_compile torch_compile_backend torch_compile_mode""",
    "Use --lr_schedule and --min_lr_rate.": "lr_scheduler_kwargs",
    "Use --optim, --adam_beta1, --adam_beta2 and --adam_epsilon.": """
        adam_* optim_* optim_target_modules""",
}
# Settings of older scripts.
_REMOVED: Mapping[str, str] = {
    "Removed: compare with a second run of --alpha_kd 0 --alpha_ce 1.": "baseline",
    "Removed: moving the teacher between CPU and GPU in every step is slow. Use --teacher_cache"
    " auto, which frees its memory before training, or --quantization nf4:teacher.": """
        teacher_offload offload_teacher teacher_cpu_offload""",
    "Removed: trainable weights and losses are always float32; --model_dtype float32 also computes"
    " the products in it.": "use_fp32_for_training",
    "Removed: temperature and weights are constant, see --temperature and --alpha_kd.": "schedule",
    "Removed: use --alpha_kd, or --align chunks for a teacher with another tokenizer.": """
        alpha_attention alpha_hidden layer_map""",
    "Removed: float16 runs only on a GPU that supports it, see --model_dtype.": "emulate_fp16",
    "Removed: the first five steps are always logged, see --log_every.": "verbose_steps",
    "Removed: the best student is kept; lower --max_steps to stop earlier.": "patience",
}
_SETTINGS_HERE = {"optim", "warmup_steps"}  # though not of the other modes
INSTEAD: Mapping[str, str] = {
    **{name: hint for name, hint in RunSettings.instead.items() if name not in _SETTINGS_HERE},
    **by_name(_OTHERS),
    **by_name(_REMOVED),
}

FREE_ON_RESUME = RunSettings.free_on_resume | {
    "checkpoint_every",
    "force_recompute",
    "log_every",
    "hub_model_id",
    "hub_private_repo",
    "push_to_hub",
    "rebuild_damaged",
    "teacher_url",
    "rollout_url",
}
"""Settings that may have another value when a run is resumed."""

FIRST = tuple(
    "teacher_model student_model data_path max_steps batch_size block_size learning_rate"
    " temperature alpha_kd lora_rank device run_name resume recipe".split()
)
"""Settings that `--help` shows."""

HEADING = """\
Settings of `python scripts/distill.py`: plain literals; this file is parsed, never executed.

A preset overrides the value here, and a flag of the same name overrides both: `--learning_rate
1e-5`. `python scripts/distill.py --help_all` lists the allowed values and the presets; an unknown
name or an invalid value is an error.
"""
