"""Show rows of tokens as text, and which parts of them the student learns."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ssl_kd.language.text.blocks import Blocks

SAMPLE_ROWS = 5
"""Rows that a dry run and the report show."""


def sample_rows(blocks: Blocks, tokenizer: Any, n: int = SAMPLE_ROWS) -> list[dict[str, Any]]:
    """Return the first `n` rows as text in pieces, each with or without loss.

    Padding is left out. The pieces of a row joined are its text; `tokens` and `learned` count its
    tokens and those with loss.
    """
    rows = []
    for row in range(min(n, len(blocks))):
        is_text = blocks.documents[row] > 0
        ids, counts = blocks.ids[row][is_text].tolist(), blocks.counts[row][is_text].tolist()
        tokens = list(zip(ids, counts, strict=True))
        pieces = [
            {"text": tokenizer.decode([i for i, _ in group]), "has_loss": has_loss}
            for has_loss, group in groupby(tokens, key=lambda token: token[1])
        ]
        rows.append({"tokens": len(tokens), "learned": sum(counts), "pieces": pieces})
    return rows


def describe_row(row: dict[str, Any]) -> str:
    """Return a row as one text, with the parts that have loss in `[[` and `]]`."""
    marked = [f"[[{p['text']}]]" if p["has_loss"] else p["text"] for p in row["pieces"]]
    return f"{row['tokens']} tokens, {row['learned']} with loss: {''.join(marked)}"
