"""Write the model card of a student, with the front matter that the Hub reads."""

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
    """Return a model card in Markdown with the Hub's front matter.

    `card` is the text or the rows of a table, `base` is empty for a student with new weights, and
    `made` lists the student's origin.
    """
    hub = llm_module("huggingface_hub")
    folder, hub_name = Path(base).expanduser(), base or None
    if base and folder.exists():  # the Hub takes no path
        name = folder.resolve().name
        hub_name = name if re.fullmatch(r"\w[\w.-]*", name, re.ASCII) else None
    front = hub.ModelCardData(
        library_name="peft" if adapters else "transformers",
        pipeline_tag="image-text-to-text" if images else "text-generation",
        tags=["distillation", "ssl_kd"],
        base_model=hub_name,
    )
    body = card if isinstance(card, str) else _table(card)
    if made:
        facts = {"base model": base or "none: new weights", **made}
        lines = [f"- {name}: {' '.join(text.split())}" for name, text in facts.items()]
        body = "\n".join([body.rstrip(), "", "## How it was made", "", *lines])
    return f"---\n{front.to_yaml()}\n---\n\n# {title}\n\n{body.rstrip()}\n"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(name)) for name in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
