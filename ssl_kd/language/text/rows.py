"""Read the text of a run, lay it out in rows of tokens, and check that the models fit it."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ssl_kd.core.seeds import seed_of
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.models.causal import (
    CausalLM,
    load_tokenizer,
    n_ids,
    positions,
    sees,
    tokenizer_id,
    without_adapters,
)
from ssl_kd.language.settings import LanguageSettings
from ssl_kd.language.settings.groups import ChatSettings
from ssl_kd.language.text.aligned import AlignedBlocks
from ssl_kd.language.text.blocks import Blocks, isolates_documents, make_blocks
from ssl_kd.language.text.dataset import TextDataset, open_text
from ssl_kd.language.text.picture_blocks import PictureBlocks, make_picture_blocks, processor_state

logger = logging.getLogger(__name__)

MIN_HELD_OUT = 16  # rows: half of fewer would be too few to score
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")  # variables of each record
_CHECKED_ROWS = 4096  # of text, at once


def texts_of(settings: LanguageSettings) -> tuple[TextDataset, TextDataset]:
    """Return the training text and the held-out text, which have no document in common."""
    # A record may be a prompt alone if a model continues every row.
    prompts = not settings.learns_text or settings.teacher_text == 1
    forms: Any = {"field": settings.text_field, "tag_field": settings.teacher_field}
    read = partial(open_text, prompts=prompts, **forms)
    if settings.eval_path is None:
        train_set = read(settings.data_path, "train")
        eval_set = read(settings.data_path, "test")
    else:
        train_set = read(settings.data_path, "train", held_out=0)
        eval_set = read(settings.eval_path, "all")
    settings.check_images(train_set.pictured, eval_set.pictured)
    kept = train_set.without(eval_set)
    if len(kept) < len(train_set):
        message = "%d of %d training documents are also in the held-out text: not trained on"
        logger.warning(message, len(train_set) - len(kept), len(train_set))
    tags = settings.teacher_tags
    tagged = (*kept.examples, *eval_set.examples) if tags else ()
    for example in tagged:
        if example.tag not in tags:
            tag = f"{example.where}: the field {settings.teacher_field} is {example.tag!r}"
            raise SettingsError(f"{tag}; expected a tag of TEACHER_MODEL, {' or '.join(tags)}")
    learned: Any = {"learn_thoughts": settings.learn_thoughts, "tags": tags}
    return replace(kept, **learned), replace(eval_set, **learned)


def with_chat_template(lm: CausalLM, text: ChatSettings) -> CausalLM:
    """Return a model whose tokenizer uses CHAT_TEMPLATE_PATH and CHAT_TEMPLATE_KWARGS."""
    path, values = text.chat_template_path, text.chat_template_kwargs or {}
    if path is None and not values:
        return lm
    tokenizer, processor = copy.deepcopy((lm.tokenizer, lm.processor))
    template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    if path is not None:
        is_file = path.endswith(".jinja")
        try:
            template = (
                Path(path).read_text("utf-8") if is_file else load_tokenizer(path).chat_template
            )
        except UnicodeDecodeError as error:
            raise SettingsError(f"CHAT_TEMPLATE_PATH {path} is not UTF-8: convert it") from error
    if not isinstance(template, str):
        raise SettingsError(
            f"the tokenizer of {path or lm.name} has no chat template, or several: set"
            " CHAT_TEMPLATE_PATH to a .jinja file, or to a model whose tokenizer has one"
        )
    for n, v in values.items():
        if n in _GIVEN or not n.isidentifier():
            raise SettingsError(
                f"CHAT_TEMPLATE_KWARGS sets {n!r}; expected a name of letters and digits other"
                f" than {', '.join(_GIVEN)}, which a record sets"
            )
        template = f"{{% if {n} is not defined %}}{{% set {n} = {v!r} %}}{{% endif %}}\n{template}"
    for each in filter(None, (tokenizer, processor, getattr(processor, "tokenizer", None))):
        each.chat_template = template
    return replace(lm, tokenizer=tokenizer, processor=processor)


AnyRows = TypeVar("AnyRows", bound=Blocks | AlignedBlocks)


def lay_out(
    block_size: int,
    packing: bool,
    texts: TextDataset,
    student: CausalLM,
    teachers: Sequence[CausalLM] = (),
) -> Blocks:
    """Tokenize text, with its images if there are any, and lay it out in rows of tokens.

    With `packing`, a row holds several documents if all models can mask attention between them.
    """
    check_images_are_seen(texts, student, teachers)
    if student.processor is not None:  # a document per row: none is cut within an image
        return make_picture_blocks(texts, student.processor, block_size)
    models = [lm.model for lm in (student, *teachers) if lm.model]
    packing = packing and not any(example.is_prompt for example in texts.examples)
    packing = packing and all(isolates_documents(model) for model in models)
    return make_blocks(texts, student.tokenizer, block_size, packing=packing)


def first_rows(rows: AnyRows, limit: int | None) -> AnyRows:
    """Return at most `limit` rows, the first ones, which then have a digest of their own."""
    return rows if limit is None or len(rows) <= limit else rows.first(limit)


def rows_of_step(step: int, rows: int, n: int, seed: int) -> Tensor:
    """Return the indices of the `rows` rows that a step reads, of `n` rows shuffled per epoch."""
    wanted, parts = torch.arange(step * rows, (step + 1) * rows), []
    for epoch in (wanted // n).unique().tolist():
        generator = torch.Generator().manual_seed(seed_of(seed, epoch))
        order = torch.randperm(n, generator=generator)
        parts.append(order[wanted[wanted // n == epoch] - epoch * n])
    return torch.cat(parts)


def split_held_out(n: int, limit: int) -> tuple[slice, slice]:
    """Split `n` held-out rows into test rows and validation rows, at most `limit` of each.

    With fewer than MIN_HELD_OUT rows, both parts are the first `limit` rows.
    """
    if n < MIN_HELD_OUT:
        return slice(limit), slice(limit)
    half = min(limit, n // 2)
    return slice(half), slice(half, 2 * half)


def unshared_tokens(student: CausalLM, teacher: CausalLM) -> tuple[int, int]:
    """Return how many added tokens only the teacher has, and how many only the student has.

    Raise SettingsError unless the tokenizers share all other ids.
    """
    own, other = student.tokenizer, teacher.tokenizer
    if tokenizer_id(own) == tokenizer_id(other):
        return 0, 0
    ids, others = own.get_vocab(), other.get_vocab()
    alike = all(others.get(token, number) == number for token, number in ids.items())
    if alike and _splits(own) is not None and _splits(own) == _splits(other):
        return len(others.keys() - ids.keys()), len(ids.keys() - others.keys())
    raise SettingsError(
        f"the teacher {teacher.name} and the student {student.name} have different tokenizers "
        f"({len(other)} and {len(own)} tokens), and ALIGN is 'auto': choose how to align them by"
        " --align chunks or uld; or use a student with the teacher's tokenizer, or one cut from the"
        " teacher (--student_model layers:N)"
    )


def check_family(student: CausalLM, teacher: CausalLM) -> None:
    """Raise SettingsError unless `unshared_tokens` finds a common vocabulary; log the rest."""
    only = unshared_tokens(student, teacher)
    if any(only):
        logger.info("only %d tokens of the teacher and %d of the student are not shared", *only)


def _splits(tokenizer: Any) -> Any:
    """Return the part of a fast tokenizer's state that splits text; None for a slow one."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return [state[name] for name in ("model", "normalizer", "pre_tokenizer")]


def check_ids_are_known(student: CausalLM, teacher: CausalLM, *texts: Blocks) -> None:
    """Raise SettingsError if the text holds a token that the teacher does not have."""
    tokens, teacher_tokens = (
        {number: token for token, number in lm.tokenizer.get_vocab().items()}
        for lm in (student, teacher)
    )
    missing = [number for number in tokens if teacher_tokens.get(number) != tokens[number]]
    unknown = torch.tensor(missing, dtype=torch.int64)
    for blocks in texts if len(unknown) else ():
        # Padding too: the teacher has no embedding for it.
        for ids in blocks.ids.split(_CHECKED_ROWS):
            if len(unknown_ids := ids[torch.isin(ids, unknown)]):
                token = tokens[int(unknown_ids[0])]
                raise SettingsError(
                    f"the text holds the student's token {token!r}, which the teacher "
                    f"{teacher.name} does not have: use text (or a chat template) without it, a "
                    "student with the teacher's tokenizer, or --align chunks"
                )


def check_vocabulary(lm: CausalLM) -> None:
    """Raise SettingsError if a tokenizer has more ids, without added ones, than a model has rows.

    Rows for added tokens that no text contains may be missing.
    """
    rows = len(without_adapters(lm.model).get_input_embeddings().weight)
    if lm.tokenizer.vocab_size > rows:
        raise SettingsError(
            f"the tokenizer of {lm.name} has {lm.tokenizer.vocab_size} tokens, but the vocabulary"
            f" of the model has {rows} rows: save the model's own tokenizer in its folder"
        )


def check_rows(student: CausalLM, teacher: CausalLM) -> None:
    """Raise SettingsError if a cache of the teacher may hold tokens that the student lacks.

    Such tokens can be left out of a live teacher's distribution, but not of stored samples.
    """
    rows = len(without_adapters(student.model).get_output_embeddings().weight)
    if (tokens := n_ids(teacher.tokenizer)) > rows:
        raise SettingsError(
            f"TEACHER_CACHE may hold {tokens} tokens, but the vocabulary of the student "
            f"{student.name} has {rows} rows: set TEACHER_CACHE to None, or use a student with the "
            "teacher's tokens"
        )


def check_room(lm: CausalLM, block_size: int) -> None:
    """Raise SettingsError if BLOCK_SIZE exceeds the number of positions of a model."""
    room = positions(lm.model)
    if room and block_size > room:
        raise SettingsError(
            f"BLOCK_SIZE is {block_size}, but the model {lm.name} has {room} positions: set"
            f" BLOCK_SIZE to {room} or less"
        )


def check_images_are_seen(
    texts: TextDataset, student: CausalLM, teachers: Sequence[CausalLM]
) -> None:
    """Raise SettingsError if a model cannot read images, or if models prepare them differently."""
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
                f"({values}), but must get the same pixels: save the teacher's processor in the"
                " student's folder"
            )


def check_ranks_see(blocks: object, world: int) -> None:
    """Raise SettingsError if several processes train and only some rows have images.

    The processes average the gradients of the image weights, which all must have in each step.
    """
    if world == 1 or not isinstance(blocks, PictureBlocks) or not any(blocks.pictures):
        return
    if not all(blocks.pictures):
        raise SettingsError(
            f"{world} processes train together, but some records have no image, so that a process"
            " may have no gradient of the image weights: start one process, or give each record an"
            " image."
        )
