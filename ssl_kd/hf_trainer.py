"""Distill language models with the Trainer of Hugging Face, or guard a Trainer with its own loss.

The names of `ssl_kd.language.hf_trainer`, under the path that users import.
"""

from ssl_kd.language.hf_trainer import DistillationTrainer, GuardCallback

__all__ = ["DistillationTrainer", "GuardCallback"]
