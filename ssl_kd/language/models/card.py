"""Write the model card of a student, with the front matter that the Hub reads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssl_kd.language.models.causal import llm_module

_SCORES = ("perplexity", "bits_per_byte", "agreement", "kl", "ece")  # in the front matter
_LOAD = """```python
from transformers import AutoModelFor{0}, Auto{1}

model, reader = AutoModelFor{0}.from_pretrained("{2}"), Auto{1}.from_pretrained("{2}")
```"""


def model_card(
    title: str,
    card: str | Sequence[Mapping[str, Any]],
    base: str,
    adapters: bool,
    images: bool,
    made: Mapping[str, str],
) -> str:
    """Return a model card in Markdown with the Hub's front matter; it names no local folder.

    `card` is the text or the rows of a table with the student's last, `base` is empty for a student
    with new weights, and `made` lists the student's origin; `data` is the name of its text.
    """
    hub = llm_module("huggingface_hub")
    hub_name = _hub_name(base)
    base = without_folders(base)
    data = made.get("data", "")
    dataset = data.removeprefix("hf:").partition(":")[0]
    scores = {} if isinstance(card, str) or not data else card[-1]
    results = [
        hub.EvalResult("text-generation", dataset, data, name, float(f"{scores[name]:.4g}"))
        for name in _SCORES
        if isinstance(scores.get(name), float)
    ]
    front = hub.ModelCardData(
        library_name="peft" if adapters else "transformers",
        pipeline_tag="image-text-to-text" if images else "text-generation",
        tags=["distillation", "ssl_kd"],
        base_model=hub_name,
        base_model_relation=("adapter" if adapters else "finetune") if hub_name else None,
        datasets=[dataset] if data.startswith("hf:") else None,
        model_name=title if results else None,
        eval_results=results or None,
    )
    parts = [f"# {title}", card if isinstance(card, str) else _table(card)]
    if made:
        facts = {"base model": base or "none: new weights", **made}
        lines = [f"- {name}: {' '.join(text.split())}" for name, text in facts.items()]
        parts += ["## How it was made", "\n".join(lines)]
    names = ("ImageTextToText", "Processor") if images else ("CausalLM", "Tokenizer")
    parts += ["## How to load it", _LOAD.format(*names, title)]
    return f"---\n{front.to_yaml()}\n---\n\n" + "\n\n".join(filter(None, parts)) + "\n"


def _hub_name(base: str) -> str | None:
    """Return the name of a model on the Hub; of a local folder, that in its `config.json`."""
    if is_local := base[:1] in ("/", "~", ".") or os.path.exists(base):
        try:
            config = (Path(base).expanduser() / "config.json").read_text(encoding="utf-8")
            base = str(json.loads(config)["_name_or_path"])
        except (OSError, ValueError, TypeError, LookupError):
            return None
    owner = r"\w[\w.-]*/" if is_local else r"(\w[\w.-]*/)?"
    is_name = re.fullmatch(owner + r"\w[\w.-]*", base, re.ASCII) and not os.path.exists(base)
    return base if is_name else None


def without_folders(name: str) -> str:
    """Return the value of a setting with only the last part of each local path.

    >>> without_folders("0.7*/home/me/Qwen3-8B, 0.3*user/name")
    '0.7*Qwen3-8B, 0.3*user/name'
    """
    # os.path: Path.exists raises OSError for a long text.
    parts = [name] if os.path.exists(name) else re.split(r"(\s*,\s*|[*=])", name)
    is_local = [part[:1] in ("/", "~", ".") or os.path.exists(part) for part in parts]
    return "".join(Path(p).name if local else p for p, local in zip(parts, is_local, strict=True))


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        model, space, name = str(row.get("name", "")).partition(" ")  # teacher NAME
        named = {**row, "name": model + space + without_folders(name)}
        lines.append([_cell(named.get(column)) for column in columns])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
