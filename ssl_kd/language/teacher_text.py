"""Text that the teacher writes, once, in the place of a share of the text to learn from.

Sequence-level distillation: the student learns by cross-entropy, and by the teacher's distributions
where ALPHA_KD is above 0, from what the teacher itself goes on with after each prompt.

References:
    Kim and Rush, Sequence-Level Knowledge Distillation, EMNLP 2016.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path

import torch

from ssl_kd.datasets.blocks import Blocks, digest_of
from ssl_kd.errors import InputError
from ssl_kd.files import load_tensors, save_tensors
from ssl_kd.guard.seeds import seed_of
from ssl_kd.language.rollouts import continued, sampler
from ssl_kd.language.setting_groups import TrainingSettings
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.train import rows_of_step
from ssl_kd.teachers.causal import CausalLM
from ssl_kd.teachers.frozen import FrozenTeacher
from ssl_kd.training.clock import Progress
from ssl_kd.training.ranks import Ranks

logger = logging.getLogger(__name__)

TEXTS = Path("data") / "teacher_text"
COLUMNS = ("ids", "counts", "documents")
PART = 256
"""Rows of a file: what is lost of the work where it is interrupted."""


def with_teacher_text(
    settings: LanguageSettings,
    blocks: Blocks,
    teacher: CausalLM,
    frozen: FrozenTeacher,
    ranks: Ranks,
    tell: Progress,
) -> Blocks:
    """The text, with the teacher's own continuations in TEACHER_TEXT of its rows.

    They are kept below `data/teacher_text` and found again by the same teacher, text and settings.
    The first of several ranks writes them; a run that was interrupted goes on at the last file.
    They are written in the order in which training comes to them, and no further than it will.

    Raises:
        InputError: the teacher's logits are not finite where it writes.
        CorruptFileError: a file is damaged; delete it.
    """
    rows = _rows(settings, settings.teacher_text, len(blocks))
    decides = ("max_new_tokens", "rollout_temperature", "seed")
    key = [blocks.digest, teacher.weights_id, str(frozen.model.dtype)]
    key += [str(getattr(settings, name)) for name in (*decides, "teacher_text")]
    folder = TEXTS / hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
    rollouts = sampler(settings, frozen.model, teacher.tokenizer, settings.batch_size)

    def work() -> None:
        """Write the files that are not there yet."""
        for i, path in enumerate(_files(folder, rows)):
            if not path.exists():
                some = rows[i * PART : (i + 1) * PART]
                seeds = [seed_of(settings.seed, row) for row in some]
                with frozen.on_device():
                    most = settings.max_new_tokens
                    own, _ = continued(blocks, some, seeds, rollouts, max_new_tokens=most)
                if rollouts.sick:
                    raise InputError(
                        f"the teacher {teacher.name} gives logits that are not finite where it"
                        f" writes ({rollouts.sick} of {len(some)} rows): try --model_dtype float32"
                    )
                save_tensors(path, {name: getattr(own, name) for name in COLUMNS})
                tell("teacher's text", min((i + 1) * PART, len(rows)), len(rows), {})

    ranks.from_first(work)
    logger.info("the teacher's text of %d rows is in %s", len(rows), folder)
    parts = [load_tensors(path) for path in _files(folder, rows)]
    columns = {name: getattr(blocks, name).clone() for name in COLUMNS}
    for name, column in columns.items():
        column[rows] = torch.cat([part[name] for part in parts])
    characters = blocks.row_characters.clone()
    characters[rows] = 0  # not of this text
    digest = digest_of(*(column.numpy() for column in columns.values()))
    return replace(blocks, **columns, row_characters=characters, digest=digest)


def _rows(settings: TrainingSettings, share: float, n: int) -> list[int]:
    """Which of `n` rows the teacher writes, in whole files: those that training will come to."""
    generator = torch.Generator().manual_seed(seed_of(settings.seed, n))
    among = torch.zeros(n, dtype=torch.bool)
    among[torch.randperm(n, generator=generator)[: round(share * n)]] = True
    order = rows_of_step(0, n, n, settings.seed)  # of the first pass
    seen = settings.max_steps * settings.batch_size * settings.gradient_accumulation_steps
    if settings.epochs is not None:
        seen = n
    due = int(among[order[:seen]].sum())
    return order[among[order]][: -(-due // PART) * PART].tolist()


def _files(folder: Path, rows: list[int]) -> list[Path]:
    return [folder / f"part_{start // PART:05d}.pt" for start in range(0, len(rows), PART)]
