"""Check that student, teachers and text fit: tokenizers, ids, positions and images."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import torch

from ssl_kd.datasets.blocks import Blocks
from ssl_kd.datasets.picture_blocks import PictureBlocks, processor_state
from ssl_kd.datasets.text import TextDataset
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

_FEW = 5  # tokens that are named
_ROWS = 4096  # of text, looked at together
_SPLITS = ("model", "normalizer", "pre_tokenizer")  # of a fast tokenizer: what text becomes


def check_family(student: CausalLM, teacher: CausalLM) -> None:
    """Let through a teacher whose ids are the student's, but for added tokens that one side lacks.

    Raises:
        SettingsError: the tokenizers split text differently, or give a token different ids.
    """
    own, other = student.tokenizer, teacher.tokenizer
    if tokenizer_id(own) == tokenizer_id(other):
        return
    ids, others = own.get_vocab(), other.get_vocab()
    alike = all(others.get(token, number) == number for token, number in ids.items())
    if alike and _splits(own) is not None and _splits(own) == _splits(other):
        added = {
            who: sorted(set(mine) - set(yours), key=mine.__getitem__)
            for who, mine, yours in (("teacher", others, ids), ("student", ids, others))
        }
        words = (f"{_named(more)} of the {who}'s alone" for who, more in added.items() if more)
        logger.info(
            "teacher and student are of one family: the same ids, but for %s",
            " and ".join(words) or "how texts are put together",
        )
        return
    raise SettingsError(
        f"the teacher {teacher.name} and the student {student.name} have different tokenizers "
        f"({len(other)} and {len(own)} tokens), so their distributions are over different tokens. "
        "Choose how to align them: --align chunks, uld or hidden; or take a student of its family, "
        "or one cut from it (--student_model layers:N)"
    )


def _splits(tokenizer: Any) -> Any:
    """How a fast tokenizer splits text between its added tokens; None for others."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    return [state[name] for name in _SPLITS]


def _named(tokens: list[str]) -> str:
    few = ", ".join(map(repr, tokens[:_FEW])) + (", ..." if len(tokens) > _FEW else "")
    return f"{len(tokens)} added tokens ({few})"


def check_ids_are_known(student: CausalLM, teacher: CausalLM, *texts: Blocks) -> None:
    """Refuse text of the student's in which a token stands that the teacher has never seen.

    Raises:
        SettingsError: it names the token.
    """
    own, others = (
        {number: token for token, number in lm.tokenizer.get_vocab().items()}
        for lm in (student, teacher)
    )
    unknown = torch.tensor([n for n in own if others.get(n) != own[n]], dtype=torch.int64)
    for blocks in texts if len(unknown) else ():
        # Padding too: the teacher has no embedding for it.
        for ids in blocks.ids.split(_ROWS):
            if len(found := ids[torch.isin(ids, unknown)]):
                raise SettingsError(
                    f"the text holds the student's token {own[int(found[0])]!r}, which the teacher "
                    f"{teacher.name} does not have: take text (or a chat template) without it, a "
                    "student with the teacher's tokenizer, or --align chunks"
                )


def check_rows(student: CausalLM, teacher: CausalLM) -> None:
    """Refuse a student without a row for each token that a cache of the teacher may hold.

    Raises:
        SettingsError: a live teacher's are left out of the distribution; kept samples cannot be.
    """
    rows = len(without_adapters(student.model).get_output_embeddings().weight)
    if (tokens := n_ids(teacher.tokenizer)) > rows:
        raise SettingsError(
            f"TEACHER_CACHE may hold {tokens} tokens, and the student {student.name} has {rows} "
            "rows in its vocabulary: set TEACHER_CACHE to None, for the teacher itself, or take a "
            "student with the teacher's tokens"
        )


def check_room(lm: CausalLM, block_size: int) -> None:
    """Raise SettingsError where a row is longer than a model has positions."""
    room = positions(lm.model)
    if room and block_size > room:
        raise SettingsError(
            f"BLOCK_SIZE is {block_size}, but {lm.name} has {room} positions: set it "
            f"to {room} or less"
        )


def check_images_are_seen(
    texts: TextDataset, student: CausalLM, teachers: Sequence[CausalLM]
) -> None:
    """Refuse models that do not see the images of a text, or not the same.

    Raises:
        SettingsError: names the model, and what differs.
    """
    if (first := texts.pictured) is None:
        return
    for who, lm in (("student", student), *(("teacher", lm) for lm in teachers)):
        if lm.processor is None:
            why = "reads text alone"
            if lm.model is not None and sees(lm.model):
                why = "has no processor that can be read (processor.save_pretrained(folder))"
            raise SettingsError(
                f"the text holds images, first in {first}, and the {who} {lm.name} {why}: take one "
                "that AutoModelForImageTextToText and AutoProcessor load, such as a Llava or a "
                "Qwen2.5-VL"
            )
    own = processor_state(student.processor)
    for lm in teachers:
        other = processor_state(lm.processor)
        differ = [k for k in sorted({*own, *other}) if own.get(k) != other.get(k)]
        if differ:
            of = ", ".join(f"{k} {other.get(k)!r} and {own.get(k)!r}" for k in differ[:3])
            raise SettingsError(
                f"teacher {lm.name} and student {student.name} prepare images differently ({of}), "
                "and one picture is made for both: save the teacher's processor beside the student"
            )


def check_ranks_see(blocks: object, world: int) -> None:
    """Refuse what several processes cannot do: they average the same gradients at each step.

    Raises:
        SettingsError: rows without images beside others.
    """
    if world == 1 or not isinstance(blocks, PictureBlocks) or not any(blocks.pictures):
        return
    if not all(blocks.pictures):
        raise SettingsError(
            f"{world} processes average the gradients of the same weights at each step, and some"
            " rows hold no image: start one process, or give each record an image."
        )
