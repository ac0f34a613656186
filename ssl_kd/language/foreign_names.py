"""Names of settings: older ones, those of other trainers, and those that may change."""

from __future__ import annotations

from collections.abc import Mapping

from ssl_kd.settings import RunSettings
from ssl_kd.settings.foreign_names import by_name

GIVEN = "given"
"""TEACHER_MODEL and STUDENT_MODEL of a model that was handed over in memory."""

# What older scripts call the settings, and transformers' TrainingArguments and TRL where they mean
# the same, in the same unit.
ALIASES: Mapping[str, str] = {
    **RunSettings.aliases,
    "dataset_text_field": "text_field",
    "eval_steps": "eval_every",
    "lmbda": "on_policy",
    "lora_r": "lora_rank",
    "lr_scheduler_type": "lr_schedule",
    "max_completion_length": "max_new_tokens",
    "max_length": "block_size",
    "max_seq_length": "block_size",
    "per_device_batch_size": "batch_size",
    "student_lr": "learning_rate",
    "teacher_model_name_or_path": "teacher_model",
    "train_steps": "max_steps",
}
PER_PROCESS = frozenset({"per_device_train_batch_size", "per_device_batch_size"})
"""BATCH_SIZE counts the rows of all processes, these aliases those of one."""

_TRL: Mapping[str, str] = {
    "Use --model_dtype for the products; weights are trained and saved in float32.": """
        dtype torch_dtype""",
    "Use --model_dtype bfloat16.": "bf16 bf16_full_eval",
    "Use --model_dtype float16.": "fp16 fp16_full_eval",
    "Float32 products stay float32; for faster ones use --model_dtype bfloat16.": "tf32",
    "Use --report_to.": "logging_dir project tensorboard trackio_*",
    "Use --gradient_checkpointing.": "activation_* gradient_checkpointing_kwargs",
    "Use --eval_every.": "eval_delay eval_on_start eval_strategy evaluation_strategy",
    "Evaluation takes --batch_size rows at once, --eval_rows in all.": """
        eval_accumulation_steps per_device_eval_batch_size""",
    "The student with the best held-out likelihood is saved, see --eval_every.": """
        greater_is_better load_best_model_at_end metric_for_best_model""",
    "Use --data_path, and --eval_path for held-out text; it is laid out before the training.": """
        data dataloader_* dataset dataset_* datasets length_column_name mixtures
        remove_unused_columns""",
    "Answers alone are learned, wherever --data_path has messages, or prompt and completion; plain"
    " text, as --text_field chooses it, is learned whole.": """
        assistant_only_loss completion_only_loss train_on_inputs train_on_prompt""",
    "The tokenizer's own is used: save the student's tokenizer with another chat_template and"
    " eos_token, and name its folder as --student_model.": "chat_* eos_token pad_token",
    "A row has --block_size tokens, of which the answer may fill what the prompt leaves; of plain"
    " text the first 16 are the prompt.": """
        max_prompt_length truncation_mode vllm_max_model_length""",
    "Use --packing; rows are --block_size long.": """
        eval_packing pad_to_multiple_of packing_strategy padding_free""",
    "Start it by torchrun, with --shard.": "ds3_gather_for_generation fsdp fsdp_config",
    "Start it by torchrun: its processes train one student.": "ddp_* deepspeed local_rank",
    "Use --student_model, and --teacher_model for the teacher.": """
        model model_init_kwargs model_name model_name_or_path model_revision
        teacher_model_init_kwargs teacher_model_revision teacher_tokenizer_name_or_path""",
    "Use --teacher_url http://HOST:PORT/v1.": "teacher_model_server_url teacher_server_urls",
    "Use --divergence js:BETA; forward_kl and reverse_kl are what 0 and 1 stand for.": "beta",
    "Use --alpha_kd for the teacher's share and --alpha_ce for the text's.": "alpha kd_ratio",
    "Use --temperature, for teacher and student, or --rollout_temperature, for sampling.": """
        generation_kwargs teacher_temperature uld_student_temperature uld_teacher_temperature""",
    "The text's loss is cross-entropy, a mean over tokens: use --alpha_ce.": "loss_type",
    "A live teacher's whole distribution is compared; --cache_method topk:K is what a server is"
    " asked for, and what a cache keeps, with the mass of the rest.": """
        add_tail_bucket loss_add_tail loss_top_k reverse_kl_top_1_mode""",
    "Use --align uld (or chunks), and --alpha_kd.": "uld_* use_extended_uld use_uld_loss",
    "Use --lora_rank above 0.": "peft use_lora use_peft",
    "Adapters are on every linear layer but the head, without dropout; --lora_rank and --lora_alpha"
    " set them.": "lora_* target_modules use_dora use_rslora",
    "Use --quantization nf4.": """
        bnb_* load_in_4bit load_in_8bit use_bnb_nested_quant""",
    "Use --teacher_text 1.": "seq_kd",
    "The student writes one continuation a row and step: see --on_policy and --max_new_tokens."
    " --generations is the number of answers in the report.": """
        generation_batch_size max_tool_calling_iterations num_generations steps_per_generation""",
    "Tokens are drawn from all, at --rollout_temperature.": "min_p repetition_penalty top_k top_p",
    "There is none: the student writes by transformers.": """
        cache_implementation rollout_engine rollout_memory use_vllm vllm_*""",
    "The report shows as many answers of the student as --generations.": """
        log_completions log_completions_steps log_unique_prompts num_completions_to_print""",
    "Against fragmented memory set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.": """
        clear_cache_every_step torch_empty_cache_steps""",
    "No logits of a whole batch exist anyway; for less memory use --gradient_checkpointing.": """
        liger_kernel_config use_cache use_liger_kernel""",
    "There is none here; ssl_kd.hf_trainer.DistillationTrainer takes it.": """
        torch_compile torch_compile_backend torch_compile_mode""",
    "The student trains as its own config.json says: set dropout and buffers there, and name its"
    " folder as --student_model.": "disable_dropout ignore_bias_buffers",
    "There is none: a model computes attention as its config.json says.": "attn_implementation",
    "There is none: a teacher's router is balanced, a student's is not.": "router_aux_loss_coef",
    "--lr_schedule names the schedule, --warmup_fraction shapes it.": "lr_scheduler_kwargs",
}
_RETIRED: Mapping[str, str] = {
    "It was taken out: float16 is computed on a GPU that has it.": "emulate_fp16",
    "It was taken out: the router learns first, and then the teacher answers.": "router_joint",
    "It was taken out: the experts' weights sum to what they do in the model.": "router_renorm",
    "It was taken out: `ka` asks the teacher twice a batch.": "ka_forwards",
    "It was taken out: a server has 120 s for an answer, and is asked again for 300 s.": """
        teacher_patience teacher_timeout""",
    "It was taken out: the first five steps are always logged.": "verbose_steps",
    "It was taken out: train a mixture elsewhere, and name its folder as --teacher_model.": """
        teacher_experts""",
    "Use --alpha_hidden, which compares the layers themselves.": "alpha_attention",
    "Use --cache_method sample:K or topk:K.": "cache_k teacher_top_k",
    "Use --quantization nf4, for a teacher and for the base of adapters.": """
        lora_quantization teacher_quantization""",
    "Use --max_new_tokens.": "rollout_tokens",
    "Use --teacher_model train:LAYERSxDIM:STEPS.": "teacher_size teacher_steps",
    "Use --teacher_model '0.7*A, 0.3*B'.": "teacher_weights",
    "It was taken out: 100 held-out prompts are asked at most.": "answer_prompts",
    "It was taken out: in `ka` the experts of a token are sampled with probability 0.05.": """
        ka_lambda""",
    "It was taken out: peft's merge_and_unload merges the saved adapters.": "lora_merge",
    "It was taken out: losses are means over the tokens of a step.": "loss_mean",
    "It was taken out: give a smaller file as --data_path.": "max_megabytes",
    "It was taken out: the best step of all is kept; set --max_steps lower.": "patience",
    "It was taken out: the first 16 tokens of a plain text are the prompt.": "prompt_tokens",
    "It was taken out: with --stop_after none 20 bad steps restore the student.": "restore_after",
    "It was taken out: tokens are drawn from all, at --rollout_temperature.": "rollout_top_p",
    "It was taken out: the load balance in sar has the weight 0.01.": "router_beta",
    "It was taken out: a router stops learning 0.5 nats from the original gate.": "router_drift",
    "It was taken out: weights are saved in float32; transformers casts them.": "save_dtype",
    "It was taken out: the vision tower is frozen.": "train_vision",
    "It was taken out: a tokenizer that is trained here has 1024 tokens.": "vocabulary",
}
INSTEAD: Mapping[str, str] = {
    **RunSettings.instead,
    **by_name(_TRL),
    **by_name(_RETIRED),
}

FREE_ON_RESUME = RunSettings.free_on_resume | {
    "checkpoint_every",
    "force_recompute",
    "log_every",
    "rebuild_damaged",
    "shard",
    "teacher_offload",
    "teacher_url",
    "report_to",
}
"""Those that may differ between a run and its continuation."""

FIRST = tuple(
    "teacher_model student_model data_path max_steps batch_size block_size learning_rate"
    " temperature alpha_kd lora_rank device dry_run run_name resume".split()
)
"""Those that `--help` shows."""

HEADING = """\
The settings of `python scripts/distill.py`: plain literals, read and never executed.

A preset beats the value here, and a flag of the same name beats both: `--learning_rate 1e-5` or
`--learning-rate 1e-5`. `python scripts/distill.py --help-all` says what each may be and lists the
presets; a name or value that cannot be is refused.
"""
