"""Map arguments of transformers' TrainingArguments to settings, or to the advice to print."""

from __future__ import annotations

from collections.abc import Mapping


def by_name(advice: Mapping[str, str]) -> dict[str, str]:
    """Invert advice -> names (separated by blanks) to name -> advice."""
    return {name: sentence for sentence, names in advice.items() for name in names.split()}


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
        "torchrun starts one process per GPU, see --device.": """
            accelerator_config average_tokens_across_devices ddp_* deepspeed fsdp fsdp_config
            local_rank log_on_each_node parallelism_config save_on_each_node""",
        "The optimizer is AdamW; --learning_rate and --weight_decay set it.": """
            adam_* optim optim_*""",
        "Use --seed, which also fixes the order of the samples.": """
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
        "Not needed: faults are recorded in the run folder; ssl_kd replay explains them.": "debug",
        "Use --push_to_hub, --hub_model_id and --hub_private_repo; HF_TOKEN or `hf auth login`"
        " gives the token.": "hub_*",
        "Not supported: targets are used without smoothing or noise.": """
            label_smoothing_factor neftune_noise_alpha""",
    }
)
