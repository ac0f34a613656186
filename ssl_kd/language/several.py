"""Several teachers of one student: the first is judged and cut from, the others teach beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ssl_kd.datasets.blocks import Blocks
from ssl_kd.guard.precision import Precision
from ssl_kd.language.family import check_family, check_ids_are_known, check_room
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.teacher import at_work
from ssl_kd.ranks import Ranks
from ssl_kd.teachers.causal import CausalLM
from ssl_kd.teachers.frozen import FrozenTeacher


@dataclass(frozen=True)
class Beside:
    """A teacher beside the first.

    Attributes:
        lm: the model.
        frozen: the same at work.
    """

    lm: CausalLM
    frozen: FrozenTeacher


def others_of(
    settings: LanguageSettings,
    precision: Precision,
    student: CausalLM,
    loaded: Sequence[CausalLM],
    blocks: Blocks,
    eval_blocks: Blocks,
    ranks: Ranks,
) -> tuple[Beside, ...]:
    """The teachers of TEACHER_MODEL but the first, which are `loaded`, on their device.

    Raises:
        SettingsError: one does not fit the student's tokenizer or the rows.
    """
    found: list[Beside] = []
    for lm in loaded:
        check_family(student, lm)
        check_ids_are_known(student, lm, blocks, eval_blocks)
        check_room(settings, lm)
        found.append(Beside(lm, at_work(settings, precision, lm, ranks)))
    return tuple(found)
