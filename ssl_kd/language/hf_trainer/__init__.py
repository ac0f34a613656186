"""Distill language models with the Trainer of Hugging Face, or guard a Trainer with its own loss.

`DistillationTrainer(student, teacher, ...)` replaces `Trainer(student, ...)`;
`Trainer(..., callbacks=[GuardCallback()])` skips bad steps of any loss. For bit-exact resume,
replay, caches, routers and teachers with other tokenizers, use `ssl_kd distill`.
"""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ssl_kd.hf_trainer needs transformers and accelerate: pip install 'ssl_kd[llm]'"
    ) from error

from firstnan.hf import GuardCallback
from ssl_kd.language.hf_trainer.distillation import DistillationTrainer

__all__ = ["DistillationTrainer", "GuardCallback"]
