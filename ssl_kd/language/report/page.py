"""Write the report of a language run, one page that opens offline."""

from pathlib import Path
from statistics import fmean, median
from typing import Any

from ssl_kd.core.pages.run_files import RunFiles
from ssl_kd.core.pages.wording import DASH, amount, base_name, duration, facts, finite, percent
from ssl_kd.core.pages.write import write_page
from ssl_kd.language.report.curves import curve_text, loss_curves, perplexity_curve
from ssl_kd.language.report.tables import SCORES
from ssl_kd.language.settings import LanguageSettings

TEACHER = "teacher"
BEFORE = "student before"
STUDENT = "student"
MAX_PROMPTS, MAX_CHARACTERS = 12, 4000
# Field of a generation -> title of its column.
TEXTS = {"teacher": TEACHER, "before": BEFORE, "after": "student after", "reference": "reference"}


def write_report(run_dir: Path) -> Path:
    """Write `report.html` from the files of a run folder, and return its path.

    A section whose data is missing is replaced by a sentence that says so.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    run = RunFiles.read(Path(run_dir))
    template = "ssl_kd.language.report", "language.html"
    return write_page(run, template, content(run), "report.html", LanguageSettings().to_dict())


def content(run: RunFiles) -> dict[str, Any]:
    """Return the values that the language template needs in addition to the frame's."""
    metrics, data = run.metrics, run.config.get("data") or {}
    rows = [row for row in metrics.get("table") or [] if isinstance(row, dict)]
    scores = {row.get("name"): row for row in rows}
    points, not_finite = _evaluations(run)
    best = metrics.get("best_step")
    if best is None and points:
        best = min(points, key=lambda point: point[1])[0]
    # Perplexities of two tokenizers cannot be compared.
    teacher = None if metrics.get("alignment") else _perplexity(scores, TEACHER)
    generations = [one for one in metrics.get("generations") or [] if isinstance(one, dict)]
    return {
        "title": f"{base_name(data.get('name', run.path.name))} · ssl_kd",
        **_header(run, scores, points),
        "table": _table(rows),
        "validated_apart": data.get("validated_apart"),
        "training": facts(_training(run)),
        "curves": loss_curves(run.steps, run.events),
        "curve_text": curve_text(run.steps),
        "perplexity": perplexity_curve(points, best, teacher),
        "best": next((f"{amount(v)} at step {step:.0f}" for step, v in points if step == best), ""),
        "not_finite": not_finite,
        "generations": [
            {"prompt": _cut(one.get("prompt")), "texts": [_cut(one.get(key)) for key in TEXTS]}
            for one in generations[:MAX_PROMPTS]
        ],
        "n_prompts": len(generations),
        "columns": list(TEXTS.values()),
        "watched": bool(run.steps or run.events or metrics),
        "inputs": facts(_inputs(run)),
        "left_out": "\n".join(
            str(line) for name in ("shares", "left_out") for line in data.get(name) or []
        ),
        "sample_rows": [_sample_row(row) for row in data.get("sample_rows") or []],
    }


def _header(
    run: RunFiles, scores: dict[Any, dict[str, Any]], points: list[tuple[float, float]]
) -> dict[str, Any]:
    """Return the headline, the line above it and the sentences below."""
    headline, lead = _headline(run, scores, points)
    if run.metrics.get("best_step") == 0:
        lead.append("No evaluation was better than the student before training, which was kept.")
    if finite(total := (run.metrics.get("seconds") or {}).get("total")):
        lead.append(f"The whole run took {duration(total)}.")
    about = [(run.config.get("data") or {}).get("name", "")]
    for model in (TEACHER, STUDENT):
        name = (run.config.get(model) or {}).get("name")
        about.append(name and f"{model} {name}")
    return {
        "eyebrow": " · ".join(str(part) for part in (*about, f"run {run.path.name}") if part),
        "headline": headline,
        "lead": " ".join(lead),
    }


def _headline(
    run: RunFiles, scores: dict[Any, dict[str, Any]], points: list[tuple[float, float]]
) -> tuple[str, list[str]]:
    """Return a headline that compares the student's perplexity, and the sentences below it."""
    after, metrics = _perplexity(scores, STUDENT), run.metrics
    if after is None:
        why = "There is no metrics.json: the run has not ended, or ended before its evaluation."
        if metrics:
            lacks = "finite perplexity of the student" if scores else "table of scores"
            why = f"metrics.json has no {lacks}."
        if points:
            step, value = points[-1]
            why += f" At its last evaluation, step {step:.0f}, perplexity was {amount(value)}."
        return "The student has no final score", [why]
    others = {"before training": BEFORE}
    if not metrics.get("alignment"):
        others["for the teacher"] = TEACHER
    headline, steps = f"Held-out perplexity {amount(after)}", metrics.get("steps")
    for name, row in others.items():
        if (value := _perplexity(scores, row)) is not None:
            headline += f", {amount(value)} {name}"
    for term, n in (metrics.get("learned_from") or {}).items():
        if finite(steps) and n < steps:
            headline += f"; {term} learned from {n:,} of {steps:,} steps"
    if run.config.get("teacher", ...) is None:
        lead = "Without a teacher: the student was trained by cross-entropy alone."
    else:
        lead = "To see what the teacher adds, compare a run with --alpha_kd 0 --alpha_ce 1."
    return headline, [lead]


def _perplexity(scores: dict[Any, dict[str, Any]], name: str) -> float | None:
    value = scores.get(name, {}).get("perplexity")
    return value if finite(value) else None


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row for each model, and a column for each score that some model has."""
    keys = [key for key in SCORES if any(finite(row.get(key)) for row in rows)]
    candidates = [r for r in rows if r.get("name") != TEACHER and finite(r.get("perplexity"))]
    best = min(candidates, key=lambda row: row["perplexity"], default=None)
    shown = [
        {
            "name": row.get("name", DASH),
            "note": _note(row),
            "cells": [SCORES[k][1](row[k]) if finite(row.get(k)) else DASH for k in keys],
            "kind": "ours" if row is best else "bound" if row.get("name") == TEACHER else "",
            "best": row is best,
        }
        for row in rows
    ]
    return {"columns": [SCORES[key][0] for key in keys], "rows": shown}


def _note(row: dict[str, Any]) -> str:
    """Return the notes below a model's name: number of questions, batches left out."""
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


def _evaluations(run: RunFiles) -> tuple[list[tuple[float, float]], list[str]]:
    """Return step and perplexity of each evaluation, and the steps whose value is not finite."""
    points, not_finite = {}, []
    for line in run.steps:
        if isinstance(scores := line.get("eval"), dict) and finite(step := line.get("step")):
            value = scores.get("perplexity")
            if finite(value):
                points[step] = value
            else:
                not_finite.append(f"{step:.0f}")
    return sorted(points.items()), not_finite


def _training(run: RunFiles) -> dict[str, Any]:
    """Return steps, tokens, speed and memory of the training, from `metrics.json` or the log."""

    def logged(name: str) -> list[float]:
        return [value for line in run.steps if finite(value := line.get(name))]

    speed, memory, rates = map(logged, ("tokens_per_second", "gpu_memory_gb", "success_rate"))
    rate, times = run.metrics.get("success_rate"), run.metrics.get("seconds") or {}
    rate = rate if finite(rate) else fmean(rates) if rates else None
    return {
        "steps": run.metrics.get("steps") or max(logged("step"), default=None),
        "tokens": run.metrics.get("tokens"),
        "tokens per second": median(speed) if speed else None,
        "GiB of GPU memory at most": max(memory) if memory else None,
        "success rate, %": None if rate is None else 100 * rate,
        **{
            f"success rate of {term}, %": 100 * share
            for term, share in (run.metrics.get("success_rates") or {}).items()
            if finite(share)
        },
        **{f"time of {name}": duration(s) for name, s in times.items() if finite(s)},
    }


def _inputs(run: RunFiles) -> dict[str, Any]:
    """Return facts about models, text, the teacher's cache and the alignment of tokens."""
    data, values = run.config.get("data") or {}, {}
    for model in (TEACHER, STUDENT):
        about = run.config.get(model) or {}
        values[model] = about.get("name")
        for key in ("parameters", "trained", "vocabulary", "layers"):
            values[f"{model}: {key}"] = about.get(key)
    names = {"name": "text", "documents": "documents", "train_tokens": "training tokens",
             "eval_tokens": "held-out tokens", "validation_tokens": "validation tokens",
             "turns": "turns"}  # fmt: skip
    values |= {name: data.get(key) or None for key, name in names.items()}
    for part in ("cache", "alignment"):
        values |= {f"{part}: {key}": v for key, v in (run.metrics.get(part) or {}).items()}
    return values


def _sample_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of tokens for the page, at most MAX_CHARACTERS long."""
    pieces, room = [], MAX_CHARACTERS
    for piece in row["pieces"]:
        text = piece["text"][:room]
        room -= len(text)
        pieces.append({"text": text, "has_loss": piece["has_loss"]})
    if sum(len(piece["text"]) for piece in row["pieces"]) > MAX_CHARACTERS:
        pieces.append({"text": " …", "has_loss": False})
    return {**row, "pieces": pieces}


def _cut(text: Any) -> str | None:
    if text is None:
        return None
    text = str(text)
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " …"
