"""`report.html`: what was done, how well, how long, on one page that needs nothing else."""

import math
from collections import Counter
from pathlib import Path
from typing import Any, TypeGuard

import jinja2
import numpy as np

from ssl_kd.evaluate import collapsed, effective_clusters
from ssl_kd.guard.files import atomic_write_text
from ssl_kd.report import figures
from ssl_kd.report.gallery import Images, gallery
from ssl_kd.report.page import PAGE, STYLE
from ssl_kd.report.run_folder import RunFolder

ANSWER = "consensus"
BASELINES = ("k-means", "spectral clustering")
BOUND = "best head with labels (upper bound)"
DASH = "–"
STAGE_COLOURS = tuple(figures.PALETTE[i] for i in (9, 1, 0, 5, 3, 8, 7))  # no alarming red


def write_report(run_dir: Path, *, images: Images | None = None) -> Path:
    """Write `report.html` from the files of a run folder.

    What a file does not hold is left out, with a sentence that says so.

    Args:
        run_dir: The run folder.
        images: Gives the pictures of these rows of the training split; None where the data has no
            pictures. If it raises, the page has no pictures and says why.

    Returns:
        Path of the page.

    Raises:
        FileNotFoundError: If `run_dir` is not a folder.
    """
    run = RunFolder.read(Path(run_dir))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(PAGE).render(
        style=figures.Markup(STYLE), **_content(run, images)
    )
    path = run.path / "report.html"
    atomic_write_text(path, page)
    return path


def _content(run: RunFolder, images: Images | None) -> dict[str, Any]:
    """Everything the template asks for."""
    data, metrics = run.metrics.get("dataset", {}), run.metrics
    labelled = bool(data.get("labelled")) or any(
        _finite(row.get("acc")) for row in metrics.get("table", [])
    )
    noun = "image" if images is not None else "sample"
    sizes = [int(size) for size in metrics.get("cluster_sizes", [])]
    heads = sorted(metrics.get("heads", []), key=lambda h: _order(h.get("criterion")))
    chosen = [int(h["head"]) for h in heads if h.get("chosen")]
    places, clusters = run.arrays.get("map"), run.arrays.get("map_cluster")
    n_clusters = max(len(sizes), 1 + int(clusters.max(initial=-1)) if clusters is not None else 0)
    colours = list(figures.PALETTE[:n_clusters])
    map_clusters = map_labels = None
    names = _class_names(run)
    if places is not None and clusters is not None:
        colours = figures.cluster_colours(n_clusters, places, clusters)
        numbers = [str(k) for k in range(n_clusters)]
        map_clusters = figures.embedding_scatter(
            places, clusters, colours, numbers, "map of the embeddings, coloured by cluster"
        )
        labels = run.arrays.get("map_label")
        if labels is not None and (labels >= 0).any():
            n_classes = max(len(names), int(labels.max()) + 1)
            names = [*names, *map(str, range(len(names), n_classes))]
            map_labels = figures.embedding_scatter(
                places,
                labels,
                figures.class_colours(n_classes, colours, labels, clusters),
                names,
                "map of the embeddings, coloured by true class",
            )
    elif n_clusters > len(colours):
        colours = [figures.PALETTE[k % len(figures.PALETTE)] for k in range(n_clusters)]
    confusion = None
    if "confusion" in run.arrays:
        order = run.arrays.get("confusion_clusters")
        order = None if order is None else [int(k) for k in order]
        confusion = figures.confusion_matrix(run.arrays["confusion"], names, order)
    size_text, size_warnings = _sizes(sizes)
    label_names = {str(i): name for i, name in enumerate(names)}
    label_names |= {row["label"]: row["label"] for row in run.assignments
                    if row.get("label", "") not in ("", "-1", *label_names)}  # fmt: skip
    seconds = metrics.get("seconds", {})
    return {
        "title": f"{_base(data.get('name', run.path.name))} · ssl_kd",
        **_header(run, labelled, noun),
        "labelled": labelled,
        "noun": noun,
        "table": _table(metrics.get("table", [])) if labelled else {"rows": [], "splits": []},
        "map_clusters": map_clusters,
        "map_labels": map_labels,
        "map_points": f"{len(places):,}" if places is not None else "",
        "many": n_clusters > len(figures.PALETTE),
        "gallery": gallery(run, images, sizes, colours, label_names),
        "confusion": confusion,
        "sizes": figures.cluster_size_bars(sizes),
        "size_text": size_text,
        "size_warnings": size_warnings,
        "curves": figures.training_curves(run.steps, chosen, run.events),
        "training_text": _training_text(run, chosen, len(heads)),
        "events": [_event(e) for e in run.events[:200]],
        "n_events": len(run.events),
        "events_text": _events_text(run),
        "times": _times(seconds),
        "heads": [_head(h) for h in heads],
        "heads_judged": any(_finite(h.get("acc")) for h in heads),
        "heads_text": _heads_text(heads, chosen),
        "command": run.config.get("command"),
        "precision": run.config.get("precision", ""),
        "settings": sorted(_plain(run.config.get("settings", {}))),
        "versions": _plain(
            run.config.get("versions", {}) | {"commit": run.config.get("commit") or "not known"}
        ),
        "folder": run.path.name,
    }


def _header(run: RunFolder, labelled: bool, noun: str) -> dict[str, Any]:
    """The headline, the sentence below it, and the tiles with the main numbers."""
    metrics = run.metrics
    data, seconds = metrics.get("dataset", {}), metrics.get("seconds", {})
    table = metrics.get("table", [])
    n = data.get("n_train")
    count = f"{n:,} {noun}s" if isinstance(n, int) else f"{noun}s"
    k = len(metrics.get("cluster_sizes", [])) or data.get("n_classes")
    scores = {(row.get("name"), row.get("split", "train")): row for row in table}
    answer = scores.get((ANSWER, "train")) or next(
        (row for row in table if row.get("name") not in (*BASELINES, BOUND)), {}
    )
    total: Any = seconds.get("total")
    lead: list[str] = []
    if labelled and _finite(answer.get("acc")):
        headline = f"{_percent(answer['acc'])} % of {count} in the right cluster, without a label"
        lead.append(_against(answer, scores))
    else:
        headline = f"{count} sorted into {k or 'some'} clusters, without a label".capitalize()
        lead.append("No label is known here, so there is no accuracy to give.")
    agreement = _agreement(run)
    if agreement is not None and not labelled:
        lead.append(f"The heads' mean agreement is {100 * agreement:.0f}\u00a0%.")
    if _finite(total):
        lead.append(f"The whole run took {_duration(total)}.")

    tiles: list[dict[str, str]] = []

    def tile(label: str, value: Any, unit: str = "%") -> None:
        if _finite(value):
            tiles.append({"name": label, "value": _percent(value), "unit": unit})

    if labelled:
        tile("accuracy (Hungarian)", answer.get("acc"))
        tile("NMI", answer.get("nmi"))
        tile("ARI", answer.get("ari"))
        tile("accuracy, held-out data", scores.get((answer.get("name"), "test"), {}).get("acc"))
        tile("k-NN on the embeddings, with labels", metrics.get("knn_accuracy"))
        probe = metrics.get("linear_probe") or {}
        tile("linear probe on them, with labels", probe.get("accuracy"))
    elif k:
        tiles.append({"name": "clusters", "value": str(k), "unit": ""})
    tile("agreement of the heads", agreement)
    if _finite(total):
        value, _, unit = _duration(total).partition(" ")
        tiles.append({"name": "from start to report", "value": value, "unit": unit})
    teacher = metrics.get("teacher", {})
    teacher = teacher.get("name", teacher) if isinstance(teacher, dict) else teacher
    eyebrow = [str(data.get("name", run.path.name)), f"teacher {teacher}" if teacher else "",
               f"run {run.path.name}"]  # fmt: skip
    return {
        "eyebrow": " · ".join(part for part in eyebrow if part),
        "headline": headline,
        "lead": " ".join(lead),
        "tiles": tiles,
        "tile_columns": len(tiles) if len(tiles) < 7 else -(-len(tiles) // 2),
    }


def _against(answer: dict[str, Any], scores: dict[Any, dict[str, Any]]) -> str:
    """One sentence on how the answer stands against the baselines."""
    gaps = {
        name: 100 * (answer["acc"] - scores[name, "train"]["acc"])
        for name in BASELINES
        if _finite(scores.get((name, "train"), {}).get("acc"))
    }
    if not gaps:
        return "No baseline was run on the same embeddings."
    ahead = [f"{gap:.1f} points ahead of {name}" for name, gap in gaps.items() if gap >= 0]
    behind = [f"{-gap:.1f} points behind {name}" for name, gap in gaps.items() if gap < 0]
    text = ", but ".join(" and ".join(part) for part in (ahead, behind) if part)
    return f"That is {text}, on the same embeddings."


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row a method, three columns a split."""
    splits = list(dict.fromkeys(str(row.get("split", "train")) for row in rows))
    names = list(dict.fromkeys(str(row.get("name")) for row in rows))
    found = {(str(row.get("name")), str(row.get("split", "train"))): row for row in rows}
    result = []
    for name in names:
        cells = []
        for split in splits:
            row = found.get((name, split), {})
            for key in ("acc", "nmi", "ari"):
                value: Any = row.get(key)
                width = round(100 * max(0.0, value)) if key == "acc" and _finite(value) else 0
                text = _percent(value) if _finite(value) else DASH
                cells.append({"text": text, "width": width})
        notes = dict.fromkeys(
            r["note"] for (n, _), r in found.items() if n == name and r.get("note")
        )
        kind = "ours" if name == ANSWER else "base" if name in BASELINES else ""
        kind = "bound" if "upper bound" in name else kind
        result.append({"name": name, "note": "; ".join(notes), "cells": cells, "kind": kind})
    titles = {"train": "training data", "test": "held-out data"}
    return {"splits": [titles.get(split, split) for split in splits], "rows": result}


def _sizes(sizes: list[int]) -> tuple[str, list[str]]:
    """A sentence on the sizes of the clusters, and warnings where they look wrong."""
    if not sizes or not sum(sizes):
        return "", []
    effective, warnings = float(effective_clusters(sizes)), []
    empty = [k for k, size in enumerate(sizes) if size == 0]
    if collapsed(sizes):
        warnings.append(
            f"Collapse: the samples are spread as if there were only {effective:.1f} clusters "
            f"of {len(sizes)}. Fewer clusters, or another seed, may help."
        )
    if empty:
        listed = ", ".join(map(str, empty[:12])) + (" …" if len(empty) > 12 else "")
        verb = "is empty" if len(empty) == 1 else "are empty"
        warnings.append(f"{len(empty)} of {len(sizes)} clusters {verb}: {listed}.")
    text = (
        f"From {min(sizes):,} to {max(sizes):,} samples; as varied as {effective:.1f} equal "
        f"clusters of {len(sizes)}."
    )
    return text, warnings


def _training_text(run: RunFolder, chosen: list[int], n_heads: int) -> str:
    steps = run.metrics.get("steps") or (run.steps[-1].get("step") if run.steps else None)
    parts = [f"{steps:,} steps"] if isinstance(steps, int) else []
    if n_heads:
        parts.append(f"{n_heads} heads, {len(chosen)} of them chosen for the answer")
    rate = run.metrics.get("success_rate")
    if _finite(rate):
        parts.append(f"{100 * rate:.4g} % of the heads' updates went through")
    return "; ".join(parts) + "." if parts else ""


def _events_text(run: RunFolder) -> str:
    if not run.events:
        return "Nothing happened: every loss, gradient and weight stayed finite throughout."
    actions = Counter(str(e.get("action", "noted")) for e in run.events)
    parts = len({str(e.get("part")) for e in run.events})
    counted = ", ".join(f"{count:,} {name}" for name, count in actions.most_common())
    kept = sorted(run.path.glob("faults/*.pt"))
    way = f" What it was: ssl_kd replay {kept[0]}" if kept else ""
    return (
        f"The guard stepped in {_times_word(len(run.events))} on {parts} "
        f"part{'s' if parts != 1 else ''}: {counted}.{way}"
    )


def _times_word(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _event(event: dict[str, Any]) -> dict[str, str]:
    keys = ("step", "part", "stage", "reason", "action")
    return {key: str(event.get(key, DASH)) for key in keys} | {"value": _number(event.get("value"))}


def _head(head: dict[str, Any]) -> dict[str, Any]:
    return {
        "head": head.get("head", DASH),
        "criterion": _number(head.get("criterion")),
        "loss": _number(head.get("loss")),
        "used": head.get("clusters_used", DASH),
        "acc": _percent(head["acc"]) if _finite(head.get("acc")) else DASH,
        "chosen": bool(head.get("chosen")),
        "collapsed": bool(head.get("collapsed")),
    }


def _heads_text(heads: list[dict[str, Any]], chosen: list[int]) -> str:
    fallen = sum(bool(h.get("collapsed")) for h in heads)
    text = "No head collapsed" if not fallen else f"{fallen} of {len(heads)} heads collapsed"
    if chosen:
        text += f"; {len(chosen)} were chosen by what they tell about neighbours, without labels"
    if any(_finite(h.get("acc")) for h in heads):
        text += ". Accuracy stands here for information: it chose nothing"
    return text + "."


def _times(seconds: dict[str, Any]) -> list[dict[str, str]]:
    parts = {k: v for k, v in seconds.items() if k != "total" and _finite(v) and v > 0}
    return [
        {
            "name": name,
            "text": _duration(value),
            "share": f"{value / sum(parts.values()):.4f}",
            "colour": STAGE_COLOURS[i % len(STAGE_COLOURS)],
        }
        for i, (name, value) in enumerate(parts.items())
    ]


def _class_names(run: RunFolder) -> list[str]:
    names = run.metrics.get("dataset", {}).get("class_names")
    if names:
        return [str(name) for name in names]
    return [str(i) for i in range(len(run.arrays.get("confusion", ())))]


def _agreement(run: RunFolder) -> float | None:
    try:
        values = [float(row["confidence"]) for row in run.assignments]
    except (KeyError, ValueError):
        return None
    return float(np.nanmean(values)) if values else None


def _plain(mapping: dict[str, Any]) -> list[tuple[str, str]]:
    return [(str(key), str(value)) for key, value in mapping.items()]


def _base(name: Any) -> str:
    """A data set's name for the headline: the last part where it is a path."""
    return str(name).rstrip("/\\").replace("\\", "/").rpartition("/")[2] or str(name)


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _order(value: Any) -> float:
    return -value if _finite(value) else math.inf


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _number(value: Any) -> str:
    return f"{value:.4g}" if _finite(value) else DASH if value is None else str(value)


def _duration(seconds: float) -> str:
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
