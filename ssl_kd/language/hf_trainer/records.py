"""Tokenize records with text for a Trainer, as the language mode does."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ssl_kd.core.errors import InputError, first_few
from ssl_kd.language.text.blocks import isolates_documents, make_blocks
from ssl_kd.language.text.dataset import TextDataset, without_nulls
from ssl_kd.language.text.records import as_examples
from ssl_kd.language.text.shares import Share, log_shares

logger = logging.getLogger(__name__)


def tokenized(
    name: str,
    data: Any,
    tokenizer: Any,
    model: Any,
    size: int,
    packing: bool,
    learn_thoughts: bool = True,
) -> Any:
    """Return records as rows of at most `size` tokens with labels; return other data unchanged.

    With `packing`, rows of several documents have position_ids, if `model` then isolates them.
    Without `learn_thoughts`, the reasoning in assistant turns has no labels.
    """
    if isinstance(data, Mapping):  # several data sets by name
        parts = {n: (f"{name}[{n!r}]", part) for n, part in data.items()}
        how = tokenizer, model, size, packing, learn_thoughts
        return {n: tokenized(*part, *how) for n, part in parts.items()}
    first = data[0] if hasattr(data, "__len__") and len(data) else None
    if not isinstance(first, Mapping) or "input_ids" in first:
        return data
    if tokenizer is None:
        fields = f"{name} has the fields {sorted(first)}, not input_ids"
        raise InputError(f"{fields}: set processing_class to the student's tokenizer")
    items = [i for n, r in enumerate(data) for i in as_examples(without_nulls(r), f"{name}[{n}]")]
    examples = [item for item in items if not isinstance(item, str)]
    left_out = [item for item in items if isinstance(item, str)]
    if not examples:
        raise InputError(f"{name} has no usable record: {left_out[0]}")
    packing = packing and isolates_documents(model)
    texts = TextDataset(name, "all", examples, "", (), learn_thoughts=learn_thoughts)
    blocks = make_blocks(texts, tokenizer, size, packing=packing)
    shares = []
    if left_out:
        n = len(left_out)
        shares.append(Share(n, n + len(examples), "records", "left out", left_out[0]))
    log_shares(logger, name, [*shares, *blocks.shares])
    for message in first_few([*left_out, *blocks.left_out]):
        logger.info("%s", message)
    rows = []
    for batch in (blocks.batch([row]) for row in range(len(blocks))):
        labels = batch.input_ids.masked_fill(~batch.counts, -100)
        row = {"input_ids": batch.input_ids[0], "labels": labels[0]}
        rows.append(row | ({"position_ids": batch.position_ids[0]} if packing else {}))
    return rows
