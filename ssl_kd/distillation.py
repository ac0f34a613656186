"""Distill language models from Python: `Distillation(teacher, student, texts).run()`.

The names of `ssl_kd.language.distillation`, under the path that users import.
"""

from ssl_kd.language.distillation import Distillation, DistilledRun

__all__ = ["DistilledRun", "Distillation"]
