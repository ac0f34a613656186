"""The text of a run: read, held out in part, and laid out in rows of tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from ssl_kd.datasets.aligned import AlignedBlocks, aligned_blocks
from ssl_kd.datasets.blocks import Blocks, isolates_documents, make_blocks
from ssl_kd.datasets.picture_blocks import make_picture_blocks
from ssl_kd.datasets.text import TextDataset, open_text
from ssl_kd.language.model_checks import check_images_are_seen
from ssl_kd.language.setting_groups import TextSettings
from ssl_kd.teachers.causal import CausalLM

logger = logging.getLogger(__name__)


def texts_of(settings: TextSettings) -> tuple[TextDataset, TextDataset]:
    """What is learned from, and what is held out; no document is both."""
    read = partial(open_text, field=settings.text_field)
    if settings.eval_path is None:
        train_set = read(settings.data_path, "train")
        eval_set = read(settings.data_path, "test")
    else:  # all is learned from where the held-out text is a file of its own
        train_set = read(settings.data_path, "train", held_out=0)
        eval_set = read(settings.eval_path, "all")
    kept = train_set.without(eval_set)
    if len(kept) < len(train_set):
        words = "%d of %d documents to learn from are held out, too, and left out of training"
        logger.warning(words, len(train_set) - len(kept), len(train_set))
    return kept, eval_set


def lay_out(
    block_size: int,
    packing: bool,
    texts: TextDataset,
    student: CausalLM,
    teacher: CausalLM | None,
    others: Sequence[CausalLM] = (),
    *,
    aligned: bool = False,
) -> Blocks | AlignedBlocks:
    """The text in rows of tokens, with its images.

    Args:
        block_size: tokens of a row.
        packing: several documents in a row, where all models keep them apart.
        texts: the documents.
        student: whose tokenizer, or processor, makes the rows.
        teacher: None for none.
        others: further teachers.
        aligned: keep the text of student and teacher, whose tokenizers differ.

    Raises:
        SettingsError: it holds images that one of the models does not see, or not as the others.
    """
    teachers = [lm for lm in (teacher, *others) if lm is not None]
    check_images_are_seen(texts, student, teachers)
    if aligned and teacher is not None:
        tokenizers = student.tokenizer, teacher.tokenizer
        return aligned_blocks(texts, *tokenizers, block_size)
    if student.processor is not None:  # a document a row: none is cut within an image
        return make_picture_blocks(texts, student.processor, block_size)
    models = [lm.model for lm in (student, teacher, *others) if lm and lm.model]
    packing = packing and all(isolates_documents(model) for model in models)
    return make_blocks(texts, student.tokenizer, block_size, packing=packing)
