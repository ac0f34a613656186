"""For a Hugging Face Trainer: the guard around any of them, and one that distils.

`Trainer(..., callbacks=[GuardCallback()])` guards the losses that you have;
`DistillationTrainer(student, teacher, ...)` takes the place of `Trainer(student, ...)`. The full
engine, with resume to the bit, replay, caches, routers and other tokenizers, is `ssl_kd distill`.
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
