"""Map setting names of older scripts and other trainers to the settings of the vision mode."""

from __future__ import annotations

from collections.abc import Mapping

from ssl_kd.core.settings import RunSettings
from ssl_kd.core.settings.foreign_names import by_name

_SAME: Mapping[str, str] = {
    "batch_size": "per_device_train_batch_size",  # each process trains some heads on whole batches
    "checkpoint_every": """
        checkpoint_freq checkpoint_interval save_every save_freq save_interval saveckp_freq""",
    "clip_grad": "grad_clip grad_clip_norm gradient_clip gradient_clip_val gradient_clipping",
    "column": "audio_column image_column text_column",
    "data_dir": "data_root",
    "dataset": "dataset_name",
    "dataset_test": "test_dataset",
    "embedding_dim": "embed_dim embeddings_dim feature_dim",
    "embeddings_dir": "cache_dir embedding_dir embeddings_path features_dir",
    "epochs": "max_epochs n_epochs num_epochs train_epochs",
    "force_recompute": "force_extract recompute recompute_embeddings",
    "hidden_dim": "head_hidden_dim hidden_size",
    "image_size": "img_size input_size",
    "learning_rate": "student_lr",
    "log_every": "log_freq log_interval print_every print_freq",
    "loss": "loss_name loss_type objective",
    "max_steps": "max_iters n_steps num_steps total_steps train_steps",
    "n_clusters": "n_classes num_classes num_clusters out_dim",
    "n_heads": "num_heads",
    "n_neighbors": "k_neighbors k_neighbours knn_k neighbors neighbours num_neighbors",
    "run_name": "exp_name experiment experiment_name",
    "runs_dir": "output_path save_dir",
    "seed": "random_seed random_state",
    "student_temp": "student_temperature temperature_student",
    "teacher": "arch backbone dino_model dinov2_model feature_extractor model_name teacher_model",
    "teacher_temp": "teacher_temperature temperature_teacher",
    "teacher_weights": "pretrained_weights teacher_path weights_path",
    "use_fp16": "amp fp16 mixed_precision use_amp",
    "workers": "dataloader_num_workers n_workers num_workers",
}
ALIASES: Mapping[str, str] = {
    **{name: field for name, field in RunSettings.aliases.items() if name != "warmup_ratio"},
    **by_name(_SAME),
}

INSTEAD: Mapping[str, str] = by_name(
    {
        "Use --dataset, which takes a folder of images, too.": """
            data_path dataset_path image_dir image_folder images_dir train_dir train_path""",
        "Use --dataset_test.": "test_dir test_path test_split train_split val_*",
        "Checkpoints, log and results are in the run's folder in --runs_dir.": """
            checkpoint_dir checkpoint_path ckpt_dir log_dir logs_dir model_dir model_path
            results_dir save_path""",
        "Use --report_to; TensorBoard's files are in the run's folder.": """
            logging_dir no_tensorboard no_wandb project project_name tensorboard
            tensorboard_dir trackio_* use_tensorboard use_wandb wandb wandb_*""",
        "Use --resume, and --run_name for a certain run.": """
            checkpoint load_checkpoint resume_checkpoint resume_from resume_from_checkpoint
            resume_path""",
        "Use --student_temp and --teacher_temp.": "tau temp temperature",
        "The temperature of the EMA teachers is constant: --teacher_temp.": """
            final_teacher_temp teacher_temp_warmup_epochs warmup_teacher_temp
            warmup_teacher_temp_epochs""",
        "The optimizer is AdamW with a weight decay of 1e-4; set --learning_rate.": """
            adam_* optim optim_* optimizer weight_decay weight_decay_end""",
        "The learning rate rises in the first tenth of the steps and falls to 0; set its peak, "
        "--learning_rate.": """
            cosine_schedule lr_schedule lr_scheduler lr_scheduler_type min_lr scheduler scheduler_*
            warmup warmup_epochs warmup_fraction warmup_ratio warmup_steps""",
        "The momentum of the EMA teachers is 0.9.": """
            ema ema_* momentum momentum_teacher teacher_ema teacher_momentum""",
        "The momentum of the clusters' running marginal is 0.9.": """
            center_momentum centering_momentum marginal_momentum probs_momentum""",
        "--loss sharpened centers its targets; others need a --loss of your own.": """
            centering use_centering use_sinkhorn sinkhorn_*""",
        "A head's bottleneck is half as wide as --hidden_dim; another head is set by --head.": """
            bottleneck_dim dropout head_dropout head_layers n_layers nlayers norm_last_layer
            num_layers proj_dim projection_dim use_bn""",
        "The teacher embeds as many images at once as its memory takes; --batch_size is of the "
        "heads.": """
            embedding_batch_size eval_batch_size extract_batch_size feature_batch_size""",
        "Images are not augmented: a sample is paired with one of its --n_neighbors.": """
            aug_* augment augmentation augmentations crop_size global_crops_number
            global_crops_scale local_crops_number local_crops_scale n_crops num_crops
            num_views""",
        "Lower --beta for more evenly sized clusters.": "entropy_* lambda_entropy",
        "Use --n_clusters, and --embedding_dim for the width of the embeddings.": "output_dim",
        "Use --head, with the import path of a class.": "head_class head_type",
        "The name of --teacher has the size of its patches.": "patch_size",
        "Embeddings are always cached, with their neighbors: --embeddings_dir.": """
            knn_* neighbors_path neighbours_path save_embeddings use_cache""",
        "Batches are drawn by --seed.": "drop_last shuffle",
        "Use --workers.": "persistent_workers pin_memory prefetch_factor",
        "torchrun starts one process per GPU; else set --device, as in cuda:1.": """
            ddp_* dist_* distributed gpu gpu_id gpu_ids gpus local_rank n_gpus num_gpus
            world_size""",
        "Use --device.": "no_cuda use_cpu use_cuda use_gpu",
        "A step takes one batch: --batch_size.": """
            accum_steps accumulation_steps gradient_accumulation_steps""",
        "Without --epochs, training ends when the heads have converged.": """
            early_* patience""",
        "A run is scored once, after the training, if there are labels.": """
            eval_every eval_freq eval_interval eval_steps eval_strategy""",
        "The better half of the --n_heads heads votes.": """
            consensus_heads ensemble ensemble_size n_best_heads top_heads""",
        "A head with a NaN is always left out of the step, and its first fault is saved for "
        "`ssl_kd replay`.": """
            check_nan check_nans dead_after debug detect_anomaly grad_norm_threshold
            max_consecutive_nans max_nan_steps min_heads nan_* restore_after skip_nan skip_nans
            spike_* stop_after""",
        "Losses are computed in float32 and in log space, so nothing is clamped.": """
            clamp clamp_min clip_min eps epsilon logit_clamp norm_eps safe_* use_safe_normalize""",
        "--baselines runs the linear probe, too.": "eval_knn knn_eval linear_probe probe",
        "Use --teacher timm:NAME or torchvision:NAME.": "pretrained teacher_source",
        "Labels are used for scoring only; --labels says which.": "label_smoothing n_labels",
        "Neighbors are found automatically; --n_neighbors is their number.": """
            faiss_index knn_backend mutual_neighbours neighbours_search use_faiss""",
        "Embeddings are compared by direction and by distance, as they are.": """
            l2_normalize normalize normalize_embeddings""",
        "Removed: steps run as they are.": "compile cuda_graph torch_compile use_compile",
        "Use --use_fp16, which chooses bfloat16 or float16 for the device.": """
            amp_dtype bf16 dtype precision tf32 torch_dtype use_bf16 use_tf32""",
        "Use --clear_cache_every_step.": "empty_cache torch_empty_cache_steps",
        "The column `outlier` of assignments.csv marks outliers.": "noise_threshold",
        "assignments.csv has the three likeliest clusters.": "top_k",
        "Use --log_every for the lines of metrics.jsonl.": "log_level verbose",
        "Use --seed.": "cudnn_benchmark cudnn_deterministic deterministic",
    }
)
