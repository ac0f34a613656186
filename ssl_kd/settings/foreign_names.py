"""Names that transformers' TrainingArguments give to settings of every mode, or to what none is."""

from __future__ import annotations

from collections.abc import Mapping


def by_name(answers: Mapping[str, str]) -> dict[str, str]:
    """Return name -> answer, of answer -> names separated by blanks."""
    return {name: answer for answer, names in answers.items() for name in names.split()}


ALIASES: Mapping[str, str] = {
    "logging_steps": "log_every",
    "lr": "learning_rate",
    "max_grad_norm": "clip_grad",
    "num_train_epochs": "epochs",
    "output_dir": "runs_dir",
    "per_device_train_batch_size": "batch_size",
    "save_steps": "checkpoint_every",
    "warmup_ratio": "warmup_fraction",
}
INSTEAD: Mapping[str, str] = by_name(
    {
        "torchrun starts several processes, of which each takes a GPU, see --device.": """
            accelerator_config average_tokens_across_devices ddp_* deepspeed fsdp fsdp_config
            local_rank log_on_each_node parallelism_config save_on_each_node""",
        "The optimizer is AdamW; --learning_rate and --weight_decay set it.": """
            adam_* optim optim_*""",
        "Use --seed: the order of the samples follows from it.": """
            data_seed full_determinism shuffle_dataset train_sampling_strategy""",
        "Use --log_every.": """
            disable_tqdm include_num_input_tokens_seen log_level log_level_replica
            logging_first_step logging_nan_inf_filter logging_strategy skip_memory_metrics""",
        "Use --device cpu.": "no_cuda use_cpu",
        "Use --batch_size.": "auto_find_batch_size train_batch_size",
        "Use another --run_name: no run is ever overwritten.": "overwrite_output_dir",
        "Use --resume, and --run_name for a certain run.": """
            ignore_data_skip restore_callback_states_from_checkpoint resume_from_checkpoint""",
        "Use --checkpoint_every.": "enable_jit_checkpoint save_only_model save_strategy",
        "The last two checkpoints are kept, see --checkpoint_every.": "save_total_limit",
        "Use --warmup_fraction, a fraction of the steps.": "warmup_steps",
        "Every run trains and evaluates; --resume continues one.": """
            batch_eval_metrics do_eval do_predict do_train eval_do_concat_batches
            eval_use_gather_object include_for_metrics label_names prediction_loss_only""",
        "There is none: faults are recorded in the run's folder, see ssl_kd replay.": "debug",
        "A run uploads nothing: afterwards ssl_kd export uploads clusters, and `hf upload` the"
        " student's folder.": "hub_* push_to_hub",
        "There is none: the targets are used as they are, without smoothing or noise.": """
            label_smoothing_factor neftune_noise_alpha""",
    }
)
