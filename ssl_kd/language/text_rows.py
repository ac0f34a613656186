"""The text of a run: read it, hold a part out, lay it out in rows, and check that models fit it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ssl_kd.datasets.aligned import AlignedBlocks, aligned_blocks
from ssl_kd.datasets.blocks import Blocks, isolates_documents, make_blocks
from ssl_kd.datasets.picture_blocks import PictureBlocks, make_picture_blocks, processor_state
from ssl_kd.datasets.text import TextDataset, open_text
from ssl_kd.guard.seeds import seed_of
from ssl_kd.language.setting_groups import TextSettings
from ssl_kd.settings import SettingsError
from ssl_kd.teachers.causal import (
    CausalLM,
    n_ids,
    positions,
    sees,
    tokenizer_id,
    without_adapters,
)

logger = logging.getLogger(__name__)

MIN_HELD_OUT = 16  # rows: half of fewer would be too few to score
_CHECKED_ROWS = 4096  # of text, at once


def texts_of(text: TextSettings) -> tuple[TextDataset, TextDataset]:
    """Return the training text and the held-out text; no document is in both."""
    read = partial(open_text, field=text.text_field)
    if text.eval_path is None:
        train_set = read(text.data_path, "train")
        eval_set = read(text.data_path, "test")
    else:
        train_set = read(text.data_path, "train", held_out=0)
        eval_set = read(text.eval_path, "all")
    kept = train_set.without(eval_set)
    if len(kept) < len(train_set):
        message = "%d of %d training documents are also held out, and excluded from training"
        logger.warning(message, len(train_set) - len(kept), len(train_set))
    return kept, eval_set


def lay_out(
    block_size: int,
    packing: bool,
    texts: TextDataset,
    student: CausalLM,
    teachers: Sequence[CausalLM] = (),
    *,
    aligned: bool = False,
) -> Blocks | AlignedBlocks:
    """Lay text out in rows of tokens, with its images.

    Args:
        block_size: tokens of a row.
        packing: put several documents in a row if all models can mask attention between them.
        texts: the documents.
        student: whose tokenizer, or processor, makes the rows.
        teachers: of the student.
        aligned: tokenize the text for student and teacher, whose tokenizers differ.

    Raises:
        SettingsError: the text holds images that a model cannot read, or prepares differently.
    """
    _check_images_are_seen(texts, student, teachers)
    if aligned and teachers:
        return aligned_blocks(texts, student.tokenizer, teachers[0].tokenizer, block_size)
    if student.processor is not None:  # a document per row: none is cut within an image
        return make_picture_blocks(texts, student.processor, block_size)
    models = [lm.model for lm in (student, *teachers) if lm.model]
    packing = packing and all(isolates_documents(model) for model in models)
    return make_blocks(texts, student.tokenizer, block_size, packing=packing)


def rows_of_step(step: int, rows: int, n: int, seed: int) -> Tensor:
    """Return which `rows` of `n` a step reads: each row once per epoch, shuffled anew for each."""
    wanted, parts = torch.arange(step * rows, (step + 1) * rows), []
    for epoch in (wanted // n).unique().tolist():
        generator = torch.Generator().manual_seed(seed_of(seed, epoch))
        order = torch.randperm(n, generator=generator)
        parts.append(order[wanted[wanted // n == epoch] - epoch * n])
    return torch.cat(parts)


def split_held_out(n: int, limit: int) -> tuple[slice, slice]:
    """Split `n` held-out rows into test rows, for the table, and validation rows.

    Both parts have the same size, at most `limit`. Of fewer than MIN_HELD_OUT rows both are all.
    """
    if n < MIN_HELD_OUT:
        return slice(limit), slice(limit)
    half = min(limit, n // 2)
    return slice(half), slice(half, 2 * half)


def check_family(student: CausalLM, teacher: CausalLM) -> None:
    """Raise SettingsError unless the tokenizers share all ids, except for added tokens."""
    own, other = student.tokenizer, teacher.tokenizer
    if tokenizer_id(own) == tokenizer_id(other):
        return
    ids, others = own.get_vocab(), other.get_vocab()
    alike = all(others.get(token, number) == number for token, number in ids.items())
    if alike and _splits(own) is not None and _splits(own) == _splits(other):
        only = len(others.keys() - ids.keys()), len(ids.keys() - others.keys())
        logger.info("all tokens are shared but %d of the teacher and %d of the student", *only)
        return
    raise SettingsError(
        f"the teacher {teacher.name} and the student {student.name} have different tokenizers "
        f"({len(other)} and {len(own)} tokens), so their distributions are over different tokens. "
        "Choose how to align them: --align chunks, uld or hidden; or use a student with the "
        "teacher's tokenizer, or one cut from the teacher (--student_model layers:N)"
    )


def _splits(tokenizer: Any) -> Any:
    """Return how a fast tokenizer splits text between added tokens; None for others."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return [state[name] for name in ("model", "normalizer", "pre_tokenizer")]


def check_ids_are_known(student: CausalLM, teacher: CausalLM, *texts: Blocks) -> None:
    """Raise SettingsError if the text holds a token that the teacher does not have."""
    own, others = (
        {number: token for token, number in lm.tokenizer.get_vocab().items()}
        for lm in (student, teacher)
    )
    unknown = torch.tensor([n for n in own if others.get(n) != own[n]], dtype=torch.int64)
    for blocks in texts if len(unknown) else ():
        # Padding too: the teacher has no embedding for it.
        for ids in blocks.ids.split(_CHECKED_ROWS):
            if len(found := ids[torch.isin(ids, unknown)]):
                raise SettingsError(
                    f"the text holds the student's token {own[int(found[0])]!r}, which the teacher "
                    f"{teacher.name} does not have: use text (or a chat template) without it, a "
                    "student with the teacher's tokenizer, or --align chunks"
                )


def check_rows(student: CausalLM, teacher: CausalLM) -> None:
    """Raise SettingsError if a cache of the teacher may hold a token that the student lacks.

    A live teacher's token is left out of the distribution, which is impossible for stored samples.
    """
    rows = len(without_adapters(student.model).get_output_embeddings().weight)
    if (tokens := n_ids(teacher.tokenizer)) > rows:
        raise SettingsError(
            f"TEACHER_CACHE may hold {tokens} tokens, but the vocabulary of the student "
            f"{student.name} has {rows} rows: set TEACHER_CACHE to None, or use a student with the "
            "teacher's tokens"
        )


def check_room(lm: CausalLM, block_size: int) -> None:
    """Raise SettingsError if a row is longer than a model has positions."""
    room = positions(lm.model)
    if room and block_size > room:
        raise SettingsError(
            f"BLOCK_SIZE is {block_size}, but {lm.name} has {room} positions: set it "
            f"to {room} or less"
        )


def _check_images_are_seen(
    texts: TextDataset, student: CausalLM, teachers: Sequence[CausalLM]
) -> None:
    """Raise SettingsError if a model cannot read the images of a text, or prepares them otherwise.

    One picture is made for student and teacher.
    """
    if (first := texts.pictured) is None:
        return
    for who, lm in (("student", student), *(("teacher", lm) for lm in teachers)):
        if lm.processor is None:
            reason = "reads only text"
            if lm.model is not None and sees(lm.model):
                reason = "has no readable processor (processor.save_pretrained(folder) saves one)"
            raise SettingsError(
                f"the text holds images, first in {first}, and the {who} {lm.name} {reason}: use a "
                "model that AutoModelForImageTextToText and AutoProcessor load, such as a Llava or "
                "a Qwen2.5-VL"
            )
    own = processor_state(student.processor)
    for lm in teachers:
        other = processor_state(lm.processor)
        differ = [k for k in sorted({*own, *other}) if own.get(k) != other.get(k)]
        if differ:
            values = ", ".join(f"{k} {other.get(k)!r} and {own.get(k)!r}" for k in differ[:3])
            raise SettingsError(
                f"teacher {lm.name} and student {student.name} prepare images differently "
                f"({values}), but read the same image: save the teacher's processor beside the "
                "student"
            )


def check_ranks_see(blocks: object, world: int) -> None:
    """Raise SettingsError if several processes train on rows of which only some hold images.

    They average the gradients of the same weights at each step.
    """
    if world == 1 or not isinstance(blocks, PictureBlocks) or not any(blocks.pictures):
        return
    if not all(blocks.pictures):
        raise SettingsError(
            f"{world} processes average the gradients of the same weights at each step, but some"
            " rows hold no image: start one process, or give each record an image."
        )
