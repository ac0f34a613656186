"""Load the teachers that the settings name, and move them to their device."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from ssl_kd.errors import InputError, UserError
from ssl_kd.files import sha256_file
from ssl_kd.guard.precision import Precision
from ssl_kd.language.parallel import shard_teacher
from ssl_kd.language.teacher_cache import TeacherCache
from ssl_kd.language.teacher_settings import TeacherSettings
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import CausalLM, load_causal_lm, load_tokenizer
from ssl_kd.teachers.frozen import FrozenTeacher
from ssl_kd.teachers.quantization import Quantization
from ssl_kd.training.ranks import Ranks

logger = logging.getLogger(__name__)

ALONE = Ranks(0, 1, "cpu")


def load_teacher(
    settings: TeacherSettings, name: str, precision: Precision, *, as_saved: bool = False
) -> CausalLM:
    """The teacher's model as the settings would have it loaded; `as_saved`: in its file's dtype."""
    kind, dtype = settings.quantization, precision.teacher
    return load_causal_lm(
        name,
        dtype=None if as_saved else dtype,
        remote_code=settings.trust_remote_code,
        quantization=Quantization.of(kind, precision.device, dtype),
    )


def absent_teacher(
    settings: TeacherSettings, name: str, why: UserError | OSError, student: str
) -> CausalLM:
    """What stands for a teacher that cannot be loaded where its cache can be learned from.

    Its weights are identified by the cache; its tokenizer is its own where that can be read, and
    None where not.

    Args:
        settings: TEACHER_CACHE.
        name: of the teacher.
        why: it cannot be loaded.
        student: STUDENT_MODEL.

    Raises:
        UserError, OSError: `why`, where there is no cache of the unchanged teacher.
        SettingsError: the student is made of the teacher's own layers or architecture.
    """
    folder = Path(str(settings.teacher_cache))
    if settings.teacher_cache is None or not folder.is_dir():
        raise why
    weights = TeacherCache.open(folder, verify=False).fingerprint.weights
    if " " in weights:  # with the experts that answered
        raise why
    if student.startswith(("layers:", "fresh:")):
        raise SettingsError(
            f"STUDENT_MODEL {student!r} is made of the teacher {name}, which cannot be loaded:"
            f" take llama:LAYERSxDIM, or a model of its tokenizer. ({why})"
        ) from why
    logger.warning(
        "the teacher %s cannot be loaded, so the student learns from TEACHER_CACHE alone and the "
        "table has no row of the teacher (%s)",
        name,
        why,
    )
    try:
        tokenizer = load_tokenizer(name, remote_code=settings.trust_remote_code)
    except InputError:
        tokenizer = None
    return CausalLM(None, tokenizer, name, weights)


def at_work(
    precision: Precision, teacher: CausalLM, ranks: Ranks, *, shard: bool, offload: bool = False
) -> FrozenTeacher:
    """The teacher on its device; with `shard` a piece of it on each rank's."""
    device = precision.device
    if not shard:
        return FrozenTeacher(teacher.model, device=device, dtype=precision.teacher, offload=offload)
    frozen = FrozenTeacher(teacher.model, dtype=precision.teacher)
    shard_teacher(frozen, device, ranks.world)
    return frozen


def router_id(weights: str | None) -> str:
    """Identity of ROUTER_WEIGHTS; empty where there are none."""
    if weights is None:
        return ""
    file = Path(weights)
    if not file.is_file():
        raise SettingsError(f"ROUTER_WEIGHTS: there is no router file {file}.")
    return sha256_file(file)[:16]


@dataclass(frozen=True)
class ExtraTeacher:
    """A teacher beside the first.

    Attributes:
        lm: the model.
        frozen: the same at work.
    """

    lm: CausalLM
    frozen: FrozenTeacher
