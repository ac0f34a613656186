"""A small teacher, trained on the text where the settings name none: TEACHER_MODEL `train`."""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from pathlib import Path

from ssl_kd.datasets.blocks import isolates_documents, make_blocks
from ssl_kd.datasets.new_tokenizer import train_tokenizer
from ssl_kd.datasets.text import TextDataset
from ssl_kd.guard.precision import Precision
from ssl_kd.language.parallel import check_ranks
from ssl_kd.language.presets import TEXT_ALONE
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.step import Distiller, StudentStep
from ssl_kd.language.teacher import ALONE
from ssl_kd.language.train import train
from ssl_kd.teachers.student import build_student, save_student
from ssl_kd.training.clock import Progress
from ssl_kd.training.ranks import Ranks

logger = logging.getLogger(__name__)

TEACHERS = Path("data") / "teachers"
TEACHER_LR = 2e-3  # of a small teacher that is trained here
VOCABULARY = 1024  # of a tokenizer that is trained here


def trained_teacher(
    settings: LanguageSettings,
    texts: TextDataset,
    precision: Precision,
    tell: Progress,
    ranks: Ranks = ALONE,
) -> Path:
    """A small teacher trained on the text by cross-entropy; found again where it was before.

    Several ranks train it together.

    Returns:
        Its folder, below `data/teachers`.
    """
    assert settings.to_train is not None
    size, steps = settings.to_train
    own = settings.replace(
        teacher_model="none",
        teacher_cache=None,
        student_model=f"fresh:{size}",
        max_steps=steps,
        epochs=None,
        **TEXT_ALONE,
        learning_rate=TEACHER_LR,
        lr_schedule="cosine",
        clip_grad=1.0,
        quantization=None,
        lora_rank=0,
        shard=False,
        teacher_text=0.0,
    )
    key = [texts.digest, precision.student, own.block_size, own.packing, own.batch_size]
    key += [own.gradient_accumulation_steps, size, steps, own.seed, own.weight_decay]
    key += [own.warmup_fraction]
    folder = TEACHERS / hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:16]
    if ranks.from_first(folder.exists):
        logger.info("using the teacher trained earlier on this text: %s", folder)
        return folder
    check_ranks(ranks, own.batch_size, shard=own.shard)
    tokenizer = train_tokenizer(texts, VOCABULARY)
    teacher = build_student(own.student_model, None, tokenizer, seed=settings.seed)
    packing = settings.packing and isolates_documents(teacher.model)
    blocks = make_blocks(texts, tokenizer, settings.block_size, packing=packing)
    distiller = Distiller(teacher.model, own, precision)

    def on_step(step: int, result: StudentStep) -> None:
        tell("teacher", step + 1, own.max_steps, {"ce": result.ce})

    train(distiller, blocks, own.max_steps, on_step=on_step)
    card = f"Trained on {texts.name} for {own.max_steps} steps, to be distilled from."
    ranks.from_first(partial(save_student, teacher.model, tokenizer, folder, card))
    return folder
