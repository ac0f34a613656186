"""The model card of a student: what the Hub reads, and how the student came to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssl_kd.teachers.causal import llm_module

__all__ = ["model_card"]


def model_card(
    title: str,
    card: str | Sequence[Mapping[str, Any]],
    base: str,
    adapters: bool,
    images: bool,
) -> str:
    """A model card with the front matter that the Hub reads."""
    hub = llm_module("huggingface_hub")
    matter = hub.ModelCardData(
        library_name="peft" if adapters else "transformers",
        pipeline_tag="image-text-to-text" if images else "text-generation",
        tags=["distillation", "ssl_kd"],
        base_model=None if not base or Path(base).exists() else base,
    )
    body = card if isinstance(card, str) else _table(card)
    return f"---\n{matter.to_yaml()}\n---\n\n# {title}\n\n{body.rstrip()}\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(name)) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
