"""Format the scores of language models as the commands and the report show them."""

from collections.abc import Callable
from typing import Any

from rich.table import Table
from rich.text import Text

from ssl_kd.core.errors import printable
from ssl_kd.core.pages.tables import new_table
from ssl_kd.core.pages.wording import amount, number, percent

SCORES: dict[str, tuple[str, Callable[[float], str]]] = {
    "perplexity": ("perplexity", amount),
    "bits_per_byte": ("bits per byte", number),
    "bits_per_character": ("bits per character", number),  # in older runs
    "agreement": ("agreement, %", percent),
    "kl": ("KL to teacher, nats", number),
    "acceptance": ("accepted as a draft, %", percent),
    "ece": ("ECE, %", percent),
    "repetition": ("repeated 4-grams, %", percent),
    "answer_accuracy": ("right answers, %", percent),
    "answer_rate": ("answered, %", percent),
}
"""Title and format of each score of a language model, by its name in `metrics.json`."""
SHOWN_CONTINUATIONS = 3
SHOWN_CHARACTERS = 150  # of a text in the terminal; the report has all of it


def language_table(metrics: dict[str, Any]) -> Table:
    """Return a table of the scores in `metrics.json`, with a column for each language model.

    With an `alignment`, teacher and student have different tokenizers; their perplexities do not
    compare and are left out.
    """
    rows, apart = metrics["table"], bool(metrics.get("alignment"))
    table = new_table("Held-out text, two tokenizers" if apart else "Held-out text", "score")
    for row in rows:
        style = "bold" if row["name"] == "student" else None
        table.add_column(Text(row["name"]), justify="right", style=style)
    for key, (name, formatted) in SCORES.items():
        values = [row.get(key) for row in rows]
        if any(value is not None for value in values) and not (apart and key == "perplexity"):
            table.add_row(name, *("-" if v is None else formatted(v) for v in values))
    return table


def continuations(metrics: dict[str, Any]) -> Text:
    """Return the first prompts in `metrics.json`, and how each model continues them, greedily."""
    titles = {"prompt": "prompt", "teacher": "teacher", "before": "before", "after": "student"}
    lines = []
    for texts in metrics["generations"][:SHOWN_CONTINUATIONS]:
        lines += [
            f"{title:8} {printable(_shortened(texts[key]))}\n"
            for key, title in titles.items()
            if key in texts
        ]
        lines.append("\n")
    return Text("".join(lines))


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def success_text(metrics: dict[str, Any]) -> str:
    """Return a sentence on the success rate of a training, in whole and by loss term."""
    rates = metrics["success_rates"]
    terms = ", ".join(f"{name} {percent(rate)} %" for name, rate in rates.items())
    return (
        f"Success rate {percent(metrics['success_rate'])} % of {metrics['steps']:,} steps ({terms})"
    )
