"""Collect what the page of a clustering run shows."""

import math
from typing import Any

import numpy as np

from ssl_kd.core.pages import figures
from ssl_kd.core.pages.wording import DASH, base_name, duration, facts, finite, number, percent
from ssl_kd.vision.data.samples import NOUNS
from ssl_kd.vision.data.usage import counted
from ssl_kd.vision.evaluate import METRICS, collapsed, effective_clusters
from ssl_kd.vision.evaluate.baselines import BASELINES
from ssl_kd.vision.report.curves import curve_text, head_curves
from ssl_kd.vision.report.decided import Decided
from ssl_kd.vision.report.gallery import ShownSamples, gallery
from ssl_kd.vision.report.results import RunResults
from ssl_kd.vision.report.tables import (
    classifier_rows,
    extension_text,
    number_text,
    other_sizes_text,
)

ANSWER = "consensus"
BY_LABELS = "best head, chosen by labels"


def content(
    run: RunResults, shown: ShownSamples | None, decided: Decided | None = None
) -> dict[str, Any]:
    """Return the values that the clustering template needs in addition to the frame's."""
    data, metrics = run.metrics.get("dataset", {}), run.metrics
    labeled = bool(data.get("labelled")) or any(
        finite(row.get("acc")) for row in metrics.get("table", [])
    )
    noun = "sample" if shown is None else NOUNS[shown.kind]
    sizes = {k: int(size) for k, size in enumerate(metrics.get("cluster_sizes", []))}
    if decided is not None:
        sizes = decided.sizes
    heads = sorted(
        metrics.get("heads", []),
        key=lambda head: -value if finite(value := head.get("criterion")) else math.inf,
    )
    points, on_map = (run.arrays.get(name, np.empty(0)) for name in ("map", "map_cluster"))
    if decided is not None:
        on_map = decided.on_map(run.arrays.get("map_row"), on_map)
        points, on_map = points[on_map >= 0], on_map[on_map >= 0]
    return {
        "title": f"{base_name(data.get('name', run.path.name))} · ssl_kd",
        **_header(run, labeled, noun, sizes, decided),
        "decisions": [] if decided is None else decided.history(),
        "labeled": labeled,
        "noun": noun,
        "table": _table(_rows_of(metrics)) if labeled else {"rows": [], "splits": []},
        "map": figures.cluster_map(points, on_map),
        "map_points": f"{len(points):,}",
        "gallery": gallery(run, shown, sizes, decided),
        **_sizes(sizes, metrics),
        "calibration": _calibration(run),
        "curves": head_curves(
            run.steps, [int(h["head"]) for h in heads if h.get("chosen")], run.events
        ),
        "curve_text": curve_text(run.steps),
        "settled": bool(metrics),
        "training": facts(_training(run, heads)),
        "heads": [_head(head) for head in heads],
        "heads_judged": any(finite(head.get("acc")) for head in heads),
    }


def _calibration(run: RunResults) -> str:
    """Return a sentence on how well the confidence of training samples is calibrated."""
    calibration = (run.metrics.get("calibration") or {}).get("train") or {}
    if not finite(ece := calibration.get("ece")):
        return ""
    text = f"Calibration error of the confidence (ECE): {100 * ece:.1f} points."
    if sure := calibration.get("sure"):
        text += f" Of {sure['n']:,} samples with confidence {sure['low']:g} or more,"
        text += f" {percent(sure['right'])} % are correct."
    return text


def _header(
    run: RunResults, labeled: bool, noun: str, sizes: dict[int, int], decided: Decided | None
) -> dict[str, Any]:
    """Return the headline, the line above it and the sentences below."""
    metrics = run.metrics
    data, seconds = metrics.get("dataset", {}), metrics.get("seconds", {}).get("total")
    n, n_labeled = data.get("n_train"), data.get("n_labelled")
    count = f"{n:,} {noun}s" if isinstance(n, int) else f"{noun}s"
    scored = count if n_labeled == n else f"the {n_labeled:,} labeled {noun}s (of {n:,})"
    k = sum(size > 0 for size in sizes.values()) or data.get("n_classes")
    table = metrics.get("table", [])
    ours = [row for row in table if row.get("name") not in (*BASELINES, BY_LABELS)]
    of_answer = [row for row in ours if (row.get("name"), row["split"]) == (ANSWER, "train")]
    answer = next(iter(of_answer or ours), {})
    lead: list[str] = []
    if "extended" in metrics:
        headline = extension_text(metrics)
        lead.append(f"They were added to the run {base_name(metrics['extended']['run'])}.")
    elif labeled and finite(answer.get("acc")):
        headline = f"{percent(answer['acc'])} % of {scored} in the right cluster, without a label"
    else:
        headline = f"{count} sorted into {k or 'some'} clusters, without a label".capitalize()
        lead.append("The data has no labels, so there is no accuracy to report.")
    if decided is not None and decided.summary:
        lead.append(decided.summary)
    if "extended" not in metrics and (found := number_text(metrics)):
        lead.append(f"{found}.")
    if "extended" not in metrics and (other := other_sizes_text(metrics)):
        lead.append(f"{other}.")
    if unreadable := data.get("unreadable"):
        has_features = metrics.get("teacher", {}).get("name") == "features"
        why = "without features" if has_features else "as unreadable"
        lead.append(f"Left out {why}: {counted(unreadable, noun)}.")
    if finite(seconds):
        lead.append(f"The whole run took {duration(seconds)}.")

    teacher = metrics.get("teacher", {}).get("name")
    about = (
        data.get("name", run.path.name),
        teacher and f"teacher {teacher}",
        f"run {run.path.name}",
    )
    return {
        "eyebrow": " · ".join(str(part) for part in about if part),
        "headline": headline,
        "lead": " ".join(lead),
    }


def _rows_of(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the table of results: of the clusterings, then of the classifiers."""
    rows = metrics.get("table", [])
    return [*rows, *classifier_rows({**metrics, "table": rows})]


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row for each method, with a cell for each split and metric."""
    splits = list(dict.fromkeys(row["split"] for row in rows))
    kinds = {ANSWER: "ours", BY_LABELS: "bound"} | dict.fromkeys(BASELINES, "base")
    shown = []
    for name in dict.fromkeys(str(row.get("name")) for row in rows):
        by_split = {row["split"]: row for row in rows if str(row.get("name")) == name}
        of_splits = [by_split.get(split, {}) for split in splits]
        scores = [row.get(key) for row in of_splits for key in METRICS]
        notes = dict.fromkeys(row["note"] for row in by_split.values() if row.get("note"))
        shown.append(
            {
                "name": name,
                "note": "; ".join(notes),
                "cells": [percent(score) if finite(score) else DASH for score in scores],
                "kind": kinds.get(name, ""),
            }
        )
    titles = {"train": "training data", "test": "held-out data"}
    titles |= {split: "new data" for split in splits if split.startswith("extend")}
    return {
        "splits": [titles.get(split, split) for split in splits],
        "metrics": list(METRICS.values()),
        "rows": shown,
    }


def _sizes(sizes: dict[int, int], metrics: dict[str, Any]) -> dict[str, Any]:
    """Return a sentence on the cluster sizes, and warnings about clusters and columns."""
    used = [size for size in sizes.values() if size]
    if not used:
        return {"size_text": "", "size_warnings": []}
    n, effective = len(sizes), float(effective_clusters(used))
    warnings = []
    empty = [str(k) for k, size in sizes.items() if size == 0]
    if collapsed(list(sizes.values())):
        warnings.append(
            f"Collapse: the effective number of clusters is {effective:.1f} of {n}. Try fewer "
            "clusters, or another seed."
        )
    if empty:
        numbers = ", ".join(empty[:12]) + (" …" if len(empty) > 12 else "")
        verb = "is empty" if len(empty) == 1 else "are empty"
        warnings.append(f"{len(empty)} of {n} clusters {verb}: {numbers}.")
    if columns := metrics.get("columns"):
        warnings.append(f"{columns[0].upper()}{columns[1:]}.")
    text = (
        f"{len(used):,} clusters of {min(used):,} to {max(used):,} samples; effective number of "
        f"clusters: {effective:.1f}."
    )
    # New samples of an extended run may well belong to a few clusters only.
    return {"size_text": text, "size_warnings": [] if "extended" in metrics else warnings}


def _training(run: RunResults, heads: list[dict[str, Any]]) -> dict[str, Any]:
    """Return facts about the training: scores, steps, heads and times."""
    settled, rate = run.metrics.get("convergence") or {}, run.metrics.get("success_rate")
    steps = run.metrics.get("steps") or (run.steps[-1].get("step") if run.steps else None)
    times = run.metrics.get("seconds") or {}
    confidence = float(np.nanmean(run.assignments["confidence"])) if len(run.assignments) else None
    return {
        "mean confidence, %": percent(confidence) if finite(confidence) else None,
        "steps": steps,
        "heads": len(heads) or None,
        "heads chosen for the answer": sum(bool(head.get("chosen")) for head in heads) or None,
        "heads that collapsed": sum(bool(h.get("collapsed")) for h in heads) if heads else None,
        "heads settled by step": next(reversed(settled), None),
        "healthy head updates, %": 100 * rate if finite(rate) else None,
        **{f"time of {name}": duration(s) for name, s in times.items() if finite(s)},
    }


def _head(head: dict[str, Any]) -> dict[str, Any]:
    return {
        "head": head.get("head", DASH),
        "criterion": number(head.get("criterion")),
        "loss": number(head.get("loss")),
        "used": head.get("clusters_used", DASH),
        "acc": percent(head["acc"]) if finite(head.get("acc")) else DASH,
        "chosen": bool(head.get("chosen")),
        "collapsed": bool(head.get("collapsed")),
    }
