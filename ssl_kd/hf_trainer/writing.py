"""The batches of a Trainer's step of which the student writes some rows itself."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssl_kd.datasets.blocks import Batch, Blocks
from ssl_kd.errors import InputError
from ssl_kd.evaluate.generation import end_tokens
from ssl_kd.hf_trainer.batches import BlockRows, batch_of
from ssl_kd.language.objective import Objective
from ssl_kd.language.rollouts import writer
from ssl_kd.seeds import seed_of
from ssl_kd.teachers.causal import positions, without_adapters


def check_rows(dataset: Any, processing: Any, model: Any) -> None:
    """Raise InputError where no student can continue the rows, before the first step."""
    if processing is None:
        raise InputError(
            "on_policy needs the student's tokenizer, which says what ends a text: give it as "
            "processing_class"
        )
    tokenizer = getattr(processing, "tokenizer", processing)
    if not hasattr(tokenizer, "eos_token_id") or not end_tokens(without_adapters(model), tokenizer):
        raise InputError(
            f"on_policy: processing_class, a {type(processing).__name__}, names no token that ends "
            "a text, and neither does the model's generation_config: set its eos_token"
        )
    if isinstance(dataset, BlockRows):
        assert isinstance(dataset.blocks, Blocks)  # LanguageSettings.check_together
        _check(dataset.blocks.packed, dataset.hold_more)


def _check(packed: bool, images: bool) -> None:
    if packed or images:
        what = (
            "several documents: put one in a row (packing=False)"
            if packed
            else "images: leave them out"
        )
        raise InputError(f"on_policy continues one text a row, and a row holds {what}")


def written_batches(
    objective: Objective,
    dataset: Any,
    samples: Sequence[Mapping[str, Any]],
    images: Sequence[int],
    processing: Any,
    step: int,
) -> tuple[list[Batch], dict[str, float]]:
    """The batches of a step.

    What the student writes depends on the seed, the step and the row: on its number, where it has
    one (`rows`), otherwise on its tokens.

    Args:
        objective: of the student.
        dataset: of the Trainer.
        samples: the Trainer's batches.
        images: ids of the tokens that stand for images.
        processing: the tokenizer, or a processor with it.
        step: from 0.

    Returns:
        The batches, and sums over their rows, as `Written.batches`.

    Raises:
        InputError: a row holds several documents, or images.
    """
    if isinstance(dataset, BlockRows):
        blocks, numbers = dataset.blocks, None
        own, shares = torch.arange(len(blocks)), [inputs["rows"].cpu() for inputs in samples]
    else:
        plain = [batch_of(inputs, torch.device("cpu"), images) for inputs in samples]
        for batch in plain:
            _check(batch.packed, batch.pictures is not None)
        most = positions(objective.student) or sys.maxsize
        blocks = _laid_out(plain, objective.settings.rollout_tokens, most)
        shares = [*torch.arange(len(blocks)).split([len(batch.rows) for batch in plain])]
        own = torch.cat([batch.rows for batch in plain])
        numbers = [n if n >= 0 else _number(blocks, at) for at, n in enumerate(own.tolist())]
    tokenizer = getattr(processing, "tokenizer", processing)
    written = writer(objective, blocks, tokenizer, numbers)
    assert written is not None
    with torch.compiler.set_stance("force_eager"):  # each length would be compiled
        batches, sums = written.batches(step, shares, objective.precision.device)
    return [replace(batch, rows=own[batch.rows]) for batch in batches], sums


def _number(blocks: Blocks, row: int) -> int:
    return seed_of(*blocks.ids[row][blocks.documents[row] > 0].tolist())


def _laid_out(batches: Sequence[Batch], room: int, most: int) -> Blocks:
    """The rows of some batches, with room after each for what may be written there."""
    longest = max(batch.input_ids.shape[1] for batch in batches)
    width = max(longest, min(longest + room, most))

    def column(name: str) -> Tensor:
        parts = [getattr(batch, name) for batch in batches]
        return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in parts])

    ids, counts, documents = map(column, ("input_ids", "counts", "documents"))
    return Blocks(ids, counts, documents, torch.zeros(len(ids), dtype=torch.int64), (), "")
