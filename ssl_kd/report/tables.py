"""The tables and lines that a command prints at its end."""

import shlex
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

SCORES = {
    "perplexity": ("perplexity", "{:.3f}"),
    "bits_per_character": ("bits per character", "{:.3f}"),
    "agreement": ("agreement with the teacher", "{:.1%}"),
    "kl": ("KL(teacher || student), nats", "{:.3f}"),
    "acceptance": ("accepted as a draft, 1 - TVD", "{:.1%}"),
    "ece": ("calibration error (ECE)", "{:.3f}"),
    "repetition": ("repeated 4-grams (seq-rep-4)", "{:.1%}"),
    "answer_accuracy": ("right answers", "{:.1%}"),
    "answer_rate": ("questions answered", "{:.1%}"),
}


def language_table(metrics: dict[str, Any]) -> Table:
    """Return the scores of language models, a column for each model; a dash for no value.

    Args:
        metrics: `table`, a row for each model; `alignment`, true where two tokenizers split the
            text, whose perplexities do not compare.
    """
    rows, apart = metrics["table"], bool(metrics.get("alignment"))
    table = _table("Held-out text, two tokenizers" if apart else "Held-out text", "score")
    for row in rows:
        style = "bold" if row["name"] == "student" else None
        table.add_column(Text(row["name"]), justify="right", style=style)
    for key, (name, form) in SCORES.items():
        values = [row.get(key) for row in rows]
        if any(value is not None for value in values) and not (apart and key == "perplexity"):
            table.add_row(name, *("-" if v is None else form.format(v) for v in values))
    return table


def extension_text(metrics: dict[str, Any]) -> str:
    """Return how the samples that extend a run were assigned, from its `metrics.json`."""
    about = metrics["extended"]
    new = [f"{c['cluster']} ({c['size']:,} samples)" for c in about["new_clusters"]]
    text = f"{about['joined']:,} of {about['n']:,} new samples joined the clusters that there were"
    noun = "new cluster" if len(new) == 1 else "new clusters"
    offered = sum(c["size"] for c in about["new_clusters"])
    noise = about["n"] - about["joined"] - offered
    left = f"{offered:,} are offered as {len(new)} {noun}: {', '.join(new)}"
    text += f"; {left if new else 'no new cluster is offered'}"
    return f"{text}; {noise:,} count as noise" if noise else text


def number_text(metrics: dict[str, Any]) -> str | None:
    """Return the number of clusters found, with its alternatives; None where K was given."""
    number = (metrics.get("graph") or {}).get("number")
    if not number:
        return None
    ranked = [level["n_clusters"] for level in number["ranked"]]
    others = ", ".join(str(k) for k in [k for k in ranked if k != number["n_clusters"]][:3])
    alternatives = f"; alternatives: {others}" if others else ""
    return f"Found {number['n_clusters']} clusters; {likely_range(metrics)}{alternatives}"


def likely_range(metrics: dict[str, Any]) -> str | None:
    """Return the interval of the number of clusters found; None where K was given."""
    number = (metrics.get("graph") or {}).get("number")
    return f"likely {number['interval'][0]} to {number['interval'][1]}" if number else None


def next_commands(path: Path) -> list[str]:
    """Return the commands that go on from a finished clustering run."""
    run = shlex.quote(str(path))
    return [f"ssl_kd explore {run}", f"ssl_kd curate {run}", f"ssl_kd export {run} --to parquet"]


def results_table(metrics: dict[str, Any]) -> Table:
    """Return the final table of a run, from its `metrics.json`: percent, a dash for no value."""
    title = "Clusters against the labels, in percent" if metrics["table"] else None
    data = metrics["dataset"]
    if title and data["n_labelled"] != data["n_train"]:
        title += f" ({data['n_labelled']:,} of {data['n_train']:,} training samples have one)"
    # 80 columns are enough for every name; only a long note takes a second line.
    table = _table(title, "answer")
    table.add_column("split")
    for score in ("ACC", "NMI", "ARI"):
        table.add_column(score, justify="right")
    table.add_column("note", overflow="fold")
    split = None
    for row in metrics["table"]:
        if split not in (None, row["split"]):
            table.add_row()
        split = row["split"]
        scores = [row.get(score) for score in ("acc", "nmi", "ari")]
        shown = ["-" if score is None else f"{100 * score:.1f}" for score in scores]
        # Text: a name in square brackets is no markup.
        cells = [row["name"], split, *shown, row.get("note") or ""]
        style = "bold" if row["name"] == "consensus" else None
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table


def _table(title: str | None, first_column: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first_column, no_wrap=True)
    return table
