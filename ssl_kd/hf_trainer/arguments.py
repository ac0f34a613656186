"""Which arguments of a Trainer the one that distils takes."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from ssl_kd.errors import InputError


def sharding(accelerator: Any) -> Any:
    """What accelerate shards by, on GPUs alone; None where it does not."""
    return getattr(accelerator.state, "fsdp_plugin", None)


def check_arguments(args: TrainingArguments, accelerator: Any) -> None:
    """Refuse arguments of a Trainer that this one cannot do.

    Raises:
        InputError: names the argument, and the way out.
    """
    world, fsdp = accelerator.num_processes, args.fsdp or sharding(accelerator)
    mesh = getattr(accelerator, "parallelism_config", None)
    split = [name for name in ("tp", "cp", "sp") if getattr(mesh, f"{name}_enabled", False)]
    refused = {
        "deepspeed": (args.deepspeed, "start plain processes by torchrun"),
        "fsdp": (
            fsdp and not getattr(accelerator, "is_fsdp2", False),
            'set fsdp_config={"version": 2}, on GPUs: only that leaves each weight its gradient',
        ),
        "torch_compile under FSDP": (fsdp and args.torch_compile, "leave one of them out"),
        "fp16 under FSDP": (fsdp and accelerator.mixed_precision == "fp16", "set bf16=True"),
        "label_smoothing_factor": (args.label_smoothing_factor, "set it to 0"),
        "parallelism_config": (split, "start plain processes by torchrun"),
        "average_tokens_across_devices=False": (
            world > 1 and not args.average_tokens_across_devices,
            "the loss is a mean over the tokens of all processes",
        ),
        "several GPUs in one process": (args.n_gpu > 1, "torchrun --nproc_per_node N"),
        "fp8": (accelerator.mixed_precision == "fp8", "set bf16=True"),
    }
    for name, (given, way) in refused.items():
        if given:
            raise InputError(f"DistillationTrainer does not take {name}: {way}")
