"""What the page of a language run says."""

from collections import Counter
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

from ssl_kd.report.curves import ACTIONS, action_name, loss_curves, perplexity_curve, term_name
from ssl_kd.report.results import RunResults
from ssl_kd.report.wording import DASH, amount, base_name, duration, finite, number, percent

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
CACHE: dict[str, tuple[str, Callable[[float], str]]] = {
    "method": ("method", number),
    "k": ("tokens kept of each distribution (k)", number),
    "stored": ("hidden states stored in", number),
    "dim": ("width of the hidden states", amount),
    "head_bytes": ("bytes of the output head, once", amount),
    "bytes_per_token": ("bytes per token", amount),
    "tail_mass": ("probability of all others (tail mass), %", percent),
    "fidelity_kl": ("fidelity (KL), nats", number),
}
ALIGNMENT: dict[str, tuple[str, Callable[[float], str]]] = {
    "coverage": ("text in groups that both sides share (coverage), %", percent),
    "one_to_one": ("text in groups of one token on each side, %", percent),
    "matched": ("text in groups of the same token on each side, %", percent),
    "groups": ("groups", amount),
    "longest_group": ("longest group, characters", amount),
}
MAX_PROMPTS, MAX_CHARACTERS = 12, 4000


def content(run: RunResults) -> dict[str, Any]:
    """What the language template asks for beyond the frame."""
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
        "results_text": _results_text(rows, data.get("validated_apart")),
        "training_text": _training_text(run),
        "curves": loss_curves(run.steps, run.events),
        "perplexity": perplexity_curve(points, best, _marks(run, rows)),
        "perplexity_text": _perplexity_text(run, points, best),
        "sick_evaluations": sick,
        "generations": _generations(metrics.get("generations") or []),
        "n_prompts": len(metrics.get("generations") or []),
        "columns": ("teacher", "student before", "student after", "reference"),
        "watched": bool(run.steps or run.events or metrics),
        "guard": _guard(run.events),
        "success": _success(run),
        "memory_text": _memory_text(run),
        "cache": _facts(metrics.get("cache") or {}, CACHE),
        "cache_missing": _cache_missing(run),
        "alignment": _facts(metrics.get("alignment") or {}, ALIGNMENT),
        "models": _models(config),
        "data": _data(data),
        "left_out": "\n".join(map(str, data.get("left_out") or [])),
    }  # fmt: skip


def _header(
    run: RunResults, rows: list[dict[str, Any]], points: list[tuple[float, float]]
) -> dict[str, Any]:
    """The headline, the sentences below it, and the tiles with the main numbers."""
    found = {row.get("name"): row for row in rows}
    headline, lead = _headline(run, found, points)
    headline += "".join(f"; {part}" for part in _partial(run))
    lead += _against_teacher(run, found)
    if run.metrics.get("best_step") == 0:
        lead.append("No evaluation was better than the student before training, which was kept.")
    total = (run.metrics.get("seconds") or {}).get("total")
    if finite(total):
        lead.append(f"The whole run took {duration(total)}.")

    tiles: list[dict[str, str]] = []

    def tile(label: str, row: str, key: str, unit: str = "") -> None:
        if finite(value := found.get(row, {}).get(key)):
            tiles.append({"name": label, "value": COLUMNS[key][1](value), "unit": unit})

    tokens = ", on its own tokens" if run.metrics.get("alignment") else ""
    tile("held-out perplexity of the student", STUDENT, "perplexity")
    tile("the student's, before training", BEFORE, "perplexity")
    tile(f"the teacher's{tokens}", TEACHER, "perplexity")
    tile("tokens where it agrees with the teacher", STUDENT, "agreement", "%")
    tile("KL to the teacher", STUDENT, "kl", "nats")
    tile("calibration error (ECE)", STUDENT, "ece", "%")
    tile("right answers", STUDENT, "answer_accuracy", "%")
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
    run: RunResults, found: dict[Any, dict[str, Any]], points: list[tuple[float, float]]
) -> tuple[str, list[str]]:
    """Whether distilling paid, or what is known instead, and the sentences below it."""
    after, before, alone = (_perplexity(found, name) for name in (STUDENT, BEFORE, ALONE))
    if after is None:
        why = "There is no metrics.json: the run has not ended, or ended before it was evaluated."
        if run.metrics:
            lacks = "finite perplexity of the student" if found else "table of scores"
            why = f"metrics.json holds no {lacks}."
        if points:
            step, value = points[-1]
            why += f" At its last evaluation, step {step:.0f}, perplexity was {amount(value)}."
        return "It is not known what the student learned", [why]
    if alone is not None:
        verdict = _verdict(after, alone, "Distilling paid", "Distilling made no difference",
                           "Distilling did not pay")  # fmt: skip
        lead = ["Cross-entropy alone is the same student on an equal budget."]
        if before is not None:
            lead.append(f"Before training it had {amount(before)}.")
        return (
            f"{verdict}: held-out perplexity {amount(after)}, "
            f"against {amount(alone)} by cross-entropy alone"
        ), lead
    way = f"is {amount(after)}"
    if before is not None:
        way = _verdict(after, before, "fell", "stayed", "rose")
        way += f" from {amount(before)} to {amount(after)}" if way != "stayed" else \
               f" at {amount(after)}"  # fmt: skip
    if run.metrics.get("best_step") == 0:
        way += ": training did not help"
    known = "Without a teacher: the student learned by cross-entropy alone."
    if not _alone(run):
        known = ("Whether distilling paid is not known: the same student was not trained by "
                 "cross-entropy alone (--baseline).")  # fmt: skip
    return f"Held-out perplexity {way}", [known]


def _partial(run: RunResults) -> list[str]:
    """Each loss term that did not take part in every step, and in how many it did."""
    steps, learned = run.metrics.get("steps"), run.metrics.get("learned_from") or {}
    if not finite(steps):
        return []
    return [f"{name} learned from {n:,} of {steps:,} steps" for name, n in learned.items()
            if n < steps]  # fmt: skip


def _alone(run: RunResults) -> bool:
    """Whether the run says that it had no teacher."""
    return run.config.get("teacher", ...) is None


def _perplexity(found: dict[Any, dict[str, Any]], name: str) -> float | None:
    value = found.get(name, {}).get("perplexity")
    return value if finite(value) else None


def _verdict(value: float, other: float, lower: str, same: str, higher: str) -> str:
    """Which of three words fits; what reads the same on the page is the same."""
    return same if amount(value) == amount(other) else lower if value < other else higher


def _against_teacher(run: RunResults, found: dict[Any, dict[str, Any]]) -> list[str]:
    """A sentence on student and teacher; across tokenizers only bits per character compare."""
    aligned = bool(run.metrics.get("alignment"))
    key = "bits_per_character" if aligned else "perplexity"
    student, teacher = (found.get(name, {}).get(key) for name in (STUDENT, TEACHER))
    if not finite(student) or not finite(teacher):
        return []
    if aligned:
        return [f"In bits per character, which can be compared across tokenizers, the student has "
                f"{number(student)} and the teacher {number(teacher)}."]  # fmt: skip
    return [f"The teacher's is {amount(teacher)}."]


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A row a model, a column for each score that at least one of them has."""
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
    """What one must know to read the numbers of a row."""
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


def _results_text(rows: list[dict[str, Any]], apart: bool | None) -> str:
    text = (
        "On held-out text, at temperature 1; lower is better in perplexity, bits per character, "
        "KL and ECE (expected calibration error). The student with the lowest perplexity is marked."
    )
    if any(finite(row.get("acceptance")) for row in rows):
        text += (
            " Accepted as a draft: how often the teacher would keep a token that the student "
            "drafts for it, in speculative decoding by sampling."
        )
    if not any(finite(row.get("answer_accuracy")) for row in rows):
        text += " No prompts with answers were judged."
    if apart is not None:
        text += (
            " The step whose student is kept was chosen by other held-out rows."
            if apart
            else " There was too little held-out text for two parts: the step was chosen by these "
            "rows, too."
        )
    return text


def _evaluations(run: RunResults) -> tuple[list[tuple[float, float]], list[str]]:
    """Step and perplexity of each evaluation, and the steps without a finite perplexity."""
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
    """What the curve is compared with; not with a perplexity over other tokens."""
    found = {row.get("name"): row for row in rows}
    names = (ALONE,) if run.metrics.get("alignment") else (TEACHER, ALONE)
    values = {name: _perplexity(found, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _perplexity_text(run: RunResults, points: list[tuple[float, float]], best: float | None) -> str:
    value = dict(points).get(best) if best is not None else None
    if best == 0:
        return "None of them was better than the student before training, which was kept."
    if value is None:
        return f"The student of step {best:.0f} was kept." if finite(best) else ""
    kept = "best_step" in run.metrics
    ending = "that student was kept" if kept else "which student is kept is not recorded yet"
    return f"{amount(value)} at step {best:.0f}; {ending}."


def _training_text(run: RunResults) -> str:
    logged = [line["step"] for line in run.steps if finite(line.get("step"))]
    steps, tokens = run.metrics.get("steps") or max(logged, default=None), run.metrics.get("tokens")
    speed = [v for line in run.steps if finite(v := line.get("tokens_per_second"))]
    parts = [f"{steps:,.0f} steps"] if finite(steps) else []
    parts += [f"{tokens:,.0f} tokens"] if finite(tokens) else []
    parts += [f"{median(speed):,.0f} tokens per second"] if speed else []
    if not run.metrics and parts:
        parts[0] += " so far"
    return "; ".join(parts) + "." if parts else ""


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


def _guard(events: list[dict[str, Any]]) -> dict[str, Any]:
    """How often the guard did what, part by part."""
    counts = Counter((str(e.get("part")), action_name(e)) for e in events)
    actions = [name for name, _ in ACTIONS.values() if any(a == name for _, a in counts)]
    busiest = Counter(str(e.get("part")) for e in events).most_common()
    rows = [
        {"name": term_name(part), "cells": [f"{counts[part, a]:,}" for a in actions]}
        for part, _ in busiest
    ]
    return {"actions": actions, "rows": rows}


def _success(run: RunResults) -> str:
    rates = [line["success_rate"] for line in run.steps if finite(line.get("success_rate"))]
    rate = run.metrics.get("success_rate")
    rate = rate if finite(rate) else fmean(rates) if rates else None
    if rate is None:
        return ""
    return "; ".join([f"{100 * rate:.4g} % of the steps went through", *_partial(run)]) + "."


def _memory_text(run: RunResults) -> str:
    used = [v for line in run.steps if finite(v := line.get("gpu_memory_gb")) and v > 0]
    if not used:
        return "metrics.jsonl holds no memory of a GPU."
    return f"At most {number(max(used))} GiB of GPU memory were in use."


def _cache_missing(run: RunResults) -> str:
    if _alone(run):
        return "there was no teacher"
    known = "cache" in run.metrics
    return "the teacher itself was loaded" if known else "metrics.json does not mention one"


def _facts(
    mapping: dict[str, Any], known: dict[str, tuple[str, Callable[[float], str]]]
) -> list[tuple[str, str]]:
    """Names and values as the page writes them; what is not `known` keeps its name."""
    facts = []
    for key, value in mapping.items():
        name, write = known.get(key, (key.replace("_", " "), number))
        if isinstance(value, dict):
            value = ", ".join(f"{k}: {number(v)}" for k, v in value.items())
        facts.append((name, write(value) if finite(value) else _text(value)))
    return facts


def _text(value: Any) -> str:
    """Text as it is; a dash for what is no number and should be one."""
    return DASH if value is None or isinstance(value, float) else str(value)


def _models(config: dict[str, Any]) -> list[dict[str, str]]:
    keys = ("parameters", "trained", "vocabulary", "layers")
    models = {who: config.get(who) or {} for who in (TEACHER, STUDENT)}
    return [
        {"role": who, "name": str(model.get("name", DASH))}
        | {key: f"{v:,.0f}" if finite(v := model.get(key)) else DASH for key in keys}
        for who, model in models.items()
        if model
    ]


def _data(data: dict[str, Any]) -> str:
    names = {"documents": "documents", "train_tokens": "tokens to learn from",
             "eval_tokens": "held-out tokens"}  # fmt: skip
    if data.get("validated_apart"):
        names["validation_tokens"] = "more of them to choose the best step by"
    parts = [f"{v:,.0f} {name}" for key, name in names.items() if finite(v := data.get(key))]
    parts += [str(data["turns"])] if data.get("turns") else []
    return ": ".join(part for part in (str(data.get("name", "")), ", ".join(parts)) if part)
