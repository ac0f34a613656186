"""The guard for a Hugging Face Trainer, and a Trainer that distils.

`Trainer(..., callbacks=[GuardCallback()])` guards your own loss;
`DistillationTrainer(student, teacher, ...)` replaces `Trainer(student, ...)`. Bit-exact resume,
replay, caches, routers and other tokenizers need `ssl_kd distill`.
"""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ssl_kd.hf_trainer needs transformers and accelerate: pip install 'ssl_kd[llm]'"
    ) from error

from ssl_kd.hf_trainer.distillation import DistillationTrainer
from ssl_kd.hf_trainer.guard_callback import GuardCallback

__all__ = ["DistillationTrainer", "GuardCallback"]
