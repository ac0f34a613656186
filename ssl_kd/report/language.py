"""The content of a language run's page."""

from collections.abc import Callable
from statistics import fmean, median
from typing import Any

from ssl_kd.report.curves import loss_curves, perplexity_curve
from ssl_kd.report.results import RunResults
from ssl_kd.report.wording import (
    DASH,
    amount,
    base_name,
    duration,
    facts,
    finite,
    number,
    percent,
)

TEACHER, BEFORE, STUDENT, ALONE = "teacher", "student before", "student", "CE alone"
COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "perplexity": ("perplexity", amount),
    "bits_per_character": ("bits per character", number),
    "agreement": ("agreement, %", percent),
    "kl": ("KL to teacher, nats", number),
    "acceptance": ("accepted as a draft, %", percent),
    "ece": ("ECE, %", percent),
    "repetition": ("repeated 4-grams, %", percent),
    "answer_accuracy": ("right answers, %", percent),
    "answer_rate": ("answered, %", percent),
}
MAX_PROMPTS, MAX_CHARACTERS = 12, 4000


def content(run: RunResults) -> dict[str, Any]:
    """Return the values of the language template beyond those of the frame."""
    metrics, config = run.metrics, run.config
    rows = [row for row in metrics.get("table") or [] if isinstance(row, dict)]
    data = config.get("data") or {}
    points, sick = _evaluations(run)
    best = metrics.get("best_step")
    if best is None and points:
        best = min(points, key=lambda point: point[1])[0]
    return {
        "title": f"{base_name(data.get('name', run.path.name))} · ssl_kd",
        **_header(run, rows, points),
        "table": _table(rows),
        "validated_apart": data.get("validated_apart"),
        "training": facts(_training(run)),
        "curves": loss_curves(run.steps, run.events),
        "perplexity": perplexity_curve(points, best, _marks(run, rows)),
        "best": next((f"{amount(v)} at step {step:.0f}" for step, v in points if step == best), ""),
        "sick_evaluations": sick,
        "generations": _generations(metrics.get("generations") or []),
        "n_prompts": len(metrics.get("generations") or []),
        "columns": ("teacher", "student before", "student after", "reference"),
        "watched": bool(run.steps or run.events or metrics),
        "cache": facts(metrics.get("cache") or {}),
        "alignment": facts(metrics.get("alignment") or {}),
        "models": _models(config),
        "data": facts(_data(data)),
        "left_out": "\n".join(map(str, data.get("left_out") or [])),
    }  # fmt: skip


def _header(
    run: RunResults, rows: list[dict[str, Any]], points: list[tuple[float, float]]
) -> dict[str, Any]:
    """Return the headline, the sentences below it, and the tiles with the main numbers."""
    scores = {row.get("name"): row for row in rows}
    headline, lead = _headline(run, scores, points)
    if run.metrics.get("best_step") == 0:
        lead.append("No evaluation was better than the student before training, which was kept.")
    total = (run.metrics.get("seconds") or {}).get("total")
    if finite(total):
        lead.append(f"The whole run took {duration(total)}.")
    tokens = ", on its own tokens" if run.metrics.get("alignment") else ""
    tiles = [
        {"name": name, "value": COLUMNS[key][1](value), "unit": unit}
        for name, row, key, unit in (
            ("held-out perplexity of the student", STUDENT, "perplexity", ""),
            ("the student's, before training", BEFORE, "perplexity", ""),
            (f"the teacher's{tokens}", TEACHER, "perplexity", ""),
            ("tokens where it agrees with the teacher", STUDENT, "agreement", "%"),
            ("KL to the teacher", STUDENT, "kl", "nats"),
            ("calibration error (ECE)", STUDENT, "ece", "%"),
            ("right answers", STUDENT, "answer_accuracy", "%"),
        )
        if finite(value := scores.get(row, {}).get(key))
    ]
    data = (run.config.get("data") or {}).get("name", "")
    teacher, student = ((run.config.get(who) or {}).get("name") for who in (TEACHER, STUDENT))
    eyebrow = [str(data), f"teacher {teacher}" if teacher else "",
               f"student {student}" if student else "", f"run {run.path.name}"]  # fmt: skip
    return {
        "eyebrow": " · ".join(part for part in eyebrow if part),
        "headline": headline,
        "lead": " ".join(lead),
        "tiles": tiles,
    }


def _headline(
    run: RunResults, scores: dict[Any, dict[str, Any]], points: list[tuple[float, float]]
) -> tuple[str, list[str]]:
    """Compare the student's perplexity with the others, and add the sentences below."""
    after = _perplexity(scores, STUDENT)
    if after is None:
        why = "There is no metrics.json: the run has not ended, or ended before it was evaluated."
        if run.metrics:
            lacks = "finite perplexity of the student" if scores else "table of scores"
            why = f"metrics.json holds no {lacks}."
        if points:
            step, value = points[-1]
            why += f" At its last evaluation, step {step:.0f}, perplexity was {amount(value)}."
        return "It is not known what the student learned", [why]
    others = {"before training": BEFORE, "by cross-entropy alone": ALONE}
    if not run.metrics.get("alignment"):  # perplexities of two tokenizers do not compare
        others["of the teacher"] = TEACHER
    compared = [
        f"{amount(value)} {name}"
        for name, row in others.items()
        if (value := _perplexity(scores, row)) is not None
    ]
    parts = [", ".join([f"Held-out perplexity {amount(after)}", *compared]), *_partial(run)]
    if _perplexity(scores, ALONE) is not None:
        lead = ["Cross-entropy alone is the same student on an equal budget."]
    elif run.config.get("teacher", ...) is None:
        lead = ["Without a teacher: the student learned by cross-entropy alone."]
    else:
        lead = ["The same student was not trained by cross-entropy alone (--baseline)."]
    return "; ".join(parts), lead


def _partial(run: RunResults) -> list[str]:
    """Name each loss term that did not take part in every step, with its steps."""
    steps, learned = run.metrics.get("steps"), run.metrics.get("learned_from") or {}
    if not finite(steps):
        return []
    return [f"{name} learned from {n:,} of {steps:,} steps" for name, n in learned.items()
            if n < steps]  # fmt: skip


def _perplexity(found: dict[Any, dict[str, Any]], name: str) -> float | None:
    value = found.get(name, {}).get("perplexity")
    return value if finite(value) else None


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row for each model, a column for each score that at least one of them has."""
    keys = [key for key in COLUMNS if any(finite(row.get(key)) for row in rows)]
    candidates = [r for r in rows if r.get("name") != TEACHER and finite(r.get("perplexity"))]
    best = min(candidates, key=lambda row: row["perplexity"], default=None)
    result = []
    for row in rows:
        cells = [COLUMNS[k][1](row[k]) if finite(row.get(k)) else DASH for k in keys]
        kind = "ours" if row is best else "bound" if row.get("name") == TEACHER else ""
        result.append({"name": row.get("name", DASH), "note": _note(row), "cells": cells,
                       "kind": kind, "best": row is best})  # fmt: skip
    return {"columns": [COLUMNS[key][0] for key in keys] if rows else [], "rows": result}


def _note(row: dict[str, Any]) -> str:
    """Return the notes that a row's numbers need."""
    notes = []
    if finite(n := row.get("n")) and n:
        notes.append(f"{n:,.0f} questions")
        interval = row.get("interval") or ()
        if len(interval) == 2 and all(map(finite, interval)):
            low, high = interval
            notes[0] += f", {percent(low)} to {percent(high)} % of them right (95 % interval)"
    if row.get("left_out"):
        notes.append(f"evaluation batches left out, not finite: {row['left_out']}")
    return "; ".join(notes)


def _evaluations(run: RunResults) -> tuple[list[tuple[float, float]], list[str]]:
    """Return step and perplexity of each evaluation, and the steps without a finite one."""
    points, sick = {}, []
    for line in run.steps:
        if isinstance(judged := line.get("eval"), dict) and finite(step := line.get("step")):
            value = judged.get("perplexity")
            if finite(value):
                points[step] = value
            else:
                sick.append(f"{step:.0f}")
    return sorted(points.items()), sick


def _marks(run: RunResults, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the perplexities that the curve compares with, all over the same tokens."""
    found = {row.get("name"): row for row in rows}
    names = (ALONE,) if run.metrics.get("alignment") else (TEACHER, ALONE)
    values = {name: _perplexity(found, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _training(run: RunResults) -> dict[str, Any]:
    """Return what the training took, from the end of the run or from its log."""

    def logged(name: str) -> list[float]:
        return [value for line in run.steps if finite(value := line.get(name))]

    speed, memory, rates = map(logged, ("tokens_per_second", "gpu_memory_gb", "success_rate"))
    rate = run.metrics.get("success_rate")
    rate = rate if finite(rate) else fmean(rates) if rates else None
    return {
        "steps": run.metrics.get("steps") or max(logged("step"), default=None),
        "tokens": run.metrics.get("tokens"),
        "tokens per second": median(speed) if speed else None,
        "GiB of GPU memory at most": max(memory) if memory else None,
        "steps that went through, %": None if rate is None else 100 * rate,
    }


def _generations(asked: list[Any]) -> list[dict[str, Any]]:
    keys = ("teacher", "before", "after", "reference")
    return [
        {"prompt": _cut(one.get("prompt")), "texts": [_cut(one.get(key)) for key in keys]}
        for one in asked[:MAX_PROMPTS]
        if isinstance(one, dict)
    ]


def _cut(text: Any) -> str | None:
    if text is None:
        return None
    text = str(text)
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " …"


def _models(config: dict[str, Any]) -> list[dict[str, str]]:
    keys = ("parameters", "trained", "vocabulary", "layers")
    models = {who: config.get(who) or {} for who in (TEACHER, STUDENT)}
    return [
        {"role": who, "name": str(model.get("name", DASH))}
        | {key: f"{v:,.0f}" if finite(v := model.get(key)) else DASH for key in keys}
        for who, model in models.items()
        if model
    ]


def _data(data: dict[str, Any]) -> dict[str, Any]:
    """Return how much text there was; of `turns`, how many were learned."""
    names = {"name": "text", "documents": "documents", "train_tokens": "tokens to learn from",
             "eval_tokens": "held-out tokens", "validation_tokens": "tokens to choose the step by",
             "turns": "turns"}  # fmt: skip
    return {name: data.get(key) or None for key, name in names.items()}
