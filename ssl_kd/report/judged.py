"""What `ssl_kd judge` shows: a column for each model, a row for each score."""

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

SCORES = {
    "perplexity": ("perplexity", "{:.3f}"),
    "bits_per_character": ("bits per character", "{:.3f}"),
    "ece": ("calibration error (ECE)", "{:.3f}"),
    "agreement": ("agreement with the teacher", "{:.1%}"),
    "kl": ("KL(teacher || student), nats", "{:.3f}"),
    "acceptance": ("accepted as a draft there, 1 - TVD", "{:.1%}"),
    "repetition": ("repeated 4-grams (seq-rep-4)", "{:.1%}"),
    "distinct_2": ("different 2-grams (distinct-2)", "{:.1%}"),
    "rouge_l": ("ROUGE-L to the text's own", "{:.3f}"),
    "rouge_l_teacher": ("ROUGE-L to the teacher's", "{:.3f}"),
    "answer_accuracy": ("right answers", "{:.1%}"),
    "answer_rate": ("questions answered", "{:.1%}"),
}


def judged_tables(found: dict[str, Any]) -> Iterator[Table | str]:
    """The tables of a judged student, from what `ssl_kd.language.judge_finished.judge` returns."""
    rows = {row["name"]: row for row in found["table"]}
    scores = _table("Held-out text", "score", *rows)
    for key, (name, form) in SCORES.items():
        values = [row.get(key) for row in rows.values()]
        compares = key != "perplexity" or found["same_tokenizer"] is not False
        if compares and any(value is not None for value in values):
            scores.add_row(name, *(_cell(value, form) for value in values))
    yield scores
    if found["same_tokenizer"] is False:
        yield "Perplexity and agreement compare models of one tokenizer: these have two."
    if found["tasks"]:
        yield _tasks(found["tasks"], list(rows))


def _tasks(asked: list[dict[str, Any]], names: list[str]) -> Table:
    table = _table("Tasks of lm-evaluation-harness", "task", "metric", "n", *names)
    found = {(row["task"], row["metric"], row["name"]): row for row in asked}
    for task, metric in dict.fromkeys((row["task"], row["metric"]) for row in asked):
        cells = []
        for name in names:
            row = found.get((task, metric, name), {})
            error = row.get("stderr")
            cells.append(_cell(row.get("value"), "{:.4f}"))
            cells[-1] += f" ± {error:.4f}" if error is not None else ""
        n = found[task, metric, names[-1]]["n"]
        table.add_row(Text(task), Text(metric), _cell(n, "{:d}"), *cells)
    return table


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right")
    return table
