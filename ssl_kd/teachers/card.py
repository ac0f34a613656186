"""The model card of a student: what the Hub reads, and how the student came to be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssl_kd.teachers.causal import llm_module


def model_card(
    title: str,
    card: str | Sequence[Mapping[str, Any]],
    base: str,
    adapters: bool,
    images: bool,
    made: Mapping[str, str],
) -> str:
    """Return a model card with the front matter that the Hub reads.

    Args:
        title: name of the student.
        card: Markdown, or the rows of a run's table.
        base: what the student's weights began as, a folder or a name on the Hub; empty: new ones.
        adapters: whether it is adapters alone.
        images: whether it reads images.
        made: how it was made, in words.
    """
    hub = llm_module("huggingface_hub")
    matter = hub.ModelCardData(
        library_name="peft" if adapters else "transformers",
        pipeline_tag="image-text-to-text" if images else "text-generation",
        tags=["distillation", "ssl_kd"],
        base_model=_hub_id(base),
    )
    body = card if isinstance(card, str) else _table(card)
    if made := {"base model": base or "none: new weights", **made} if made else {}:
        lines = [f"- {name}: {' '.join(text.split())}" for name, text in made.items()]
        body = "\n".join([body.rstrip(), "", "## How it was made", "", *lines])
    return f"---\n{matter.to_yaml()}\n---\n\n# {title}\n\n{body.rstrip()}\n"


def _hub_id(base: str) -> str | None:
    """Return a model's name as the Hub takes it: of a folder what its own card names, or its name.

    (With a path in it a card cannot be pushed.)
    """
    folder = Path(base).expanduser()
    if not base or not folder.exists():
        return base or None
    try:
        known = llm_module("huggingface_hub").ModelCard.load(folder / "README.md").data.base_model
    except Exception:  # there is none, or yaml cannot read it
        known = None
    name = folder.resolve().name
    return known or (name if re.fullmatch(r"\w[\w.-]*", name, re.ASCII) else None)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(name)) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
