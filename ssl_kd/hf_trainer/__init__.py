"""For a Hugging Face Trainer: the guard around any, and one that distils.

`Trainer(..., callbacks=[GuardCallback()])`, and `DistillationTrainer(student, teacher, ...)` in
place of `Trainer(student, ...)`.
"""

try:
    import accelerate  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ssl_kd.hf_trainer needs transformers and accelerate: pip install 'ssl_kd[llm]'"
    ) from error

from ssl_kd.hf_trainer.distillation import DistillationTrainer
from ssl_kd.hf_trainer.guarding import GuardCallback

__all__ = ["DistillationTrainer", "GuardCallback"]
