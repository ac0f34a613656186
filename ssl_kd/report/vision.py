"""What the page of a vision run says."""

import math
from typing import Any

import numpy as np

from ssl_kd.evaluate import collapsed, effective_clusters
from ssl_kd.report import figures
from ssl_kd.report.curves import head_curves
from ssl_kd.report.gallery import Images, extreme_rows, gallery
from ssl_kd.report.results import RunResults
from ssl_kd.report.tables import (
    agreement_text,
    extension_text,
    likely_range,
    next_commands,
    number_text,
)
from ssl_kd.report.tree import tree
from ssl_kd.report.wording import DASH, base_name, duration, facts, finite, number, percent

ANSWER = "consensus"
BASELINES = ("k-means", "spectral clustering")
BOUND = "best head with labels (upper bound)"


def content(run: RunResults, images: Images | None) -> dict[str, Any]:
    """What the vision template asks for beyond the frame."""
    data, metrics = run.metrics.get("dataset", {}), run.metrics
    labelled = bool(data.get("labelled")) or any(
        finite(row.get("acc")) for row in metrics.get("table", [])
    )
    noun = "image" if images is not None else "sample"
    sizes = [int(size) for size in metrics.get("cluster_sizes", [])]
    heads = sorted(metrics.get("heads", []), key=lambda h: _order(h.get("criterion")))
    chosen = [int(h["head"]) for h in heads if h.get("chosen")]
    most = max(len(sizes), 1 + int(run.arrays.get("map_cluster", np.array([-1])).max(initial=-1)))
    names, colours = _class_names(run), list(map(figures.tint, range(most)))
    confusion = None
    if "confusion" in run.arrays:
        order = run.arrays.get("confusion_clusters")
        order = None if order is None else [int(k) for k in order]
        confusion = figures.confusion_matrix(run.arrays["confusion"], names, order)
    size_text, size_warnings = _sizes(sizes)
    if "extended" in metrics:  # new samples may well be of a few clusters only
        size_warnings = []
    label_names = {str(i): name for i, name in enumerate(names)}
    known = {"", "-1", *label_names}
    label_names |= {label: label for label in run.assignments.labels if label not in known}
    shown = gallery(run, images, sizes, colours, label_names)
    return {
        "title": f"{base_name(data.get('name', run.path.name))} · ssl_kd",
        **_header(run, labelled, noun),
        "labelled": labelled,
        "noun": noun,
        "table": _table(metrics.get("table", [])) if labelled else {"rows": [], "splits": []},
        **_maps(run, colours, names),
        "gallery": shown,
        "tree": tree(
            metrics.get("levels", []), {c["cluster"]: c["pictures"] for c in shown["clusters"]}
        ),
        "tree_text": _tree_text(metrics),
        "confusion": confusion,
        "sizes": figures.cluster_size_bars(sizes),
        "size_text": size_text,
        "size_warnings": size_warnings,
        **_trust(run),
        "curves": head_curves(run.steps, chosen, run.events),
        "training": facts(_training(run, heads)),
        "heads": [_head(h) for h in heads],
        "heads_judged": any(finite(h.get("acc")) for h in heads),
        "next_commands": next_commands(run.path),
    }


def _tree_text(metrics: dict[str, Any]) -> str:
    """What the tree is, where its number of clusters comes from, and which families agree."""
    text = "Fewer and larger clusters at the top, what they are made of inside; click to open"
    return ". ".join(t for t in (number_text(metrics), text, agreement_text(metrics)) if t) + "."


def _maps(run: RunResults, colours: list[str], names: list[str]) -> dict[str, Any]:
    """The map of the embeddings, by cluster and by true class where it is known."""
    places, clusters = run.arrays.get("map"), run.arrays.get("map_cluster")
    labels = run.arrays.get("map_label")
    maps: dict[str, Any] = {"map_clusters": None, "map_labels": None, "map_points": ""}
    if places is None or clusters is None:
        return maps
    maps["map_points"] = f"{len(places):,}"
    numbers = [str(k) for k in range(len(colours))]
    maps["map_clusters"] = figures.embedding_scatter(
        places, clusters, colours, numbers, "map of the embeddings, coloured by cluster"
    )
    if labels is not None and (labels >= 0).any():
        by_class = figures.class_colours(len(names), colours, labels, clusters)
        maps["map_labels"] = figures.embedding_scatter(
            places, labels, by_class, names, "map of the embeddings, coloured by true class"
        )
    return maps


def _trust(run: RunResults) -> dict[str, Any]:
    """How far to trust the confidence, and which samples lie farthest out."""
    found = (run.metrics.get("calibration") or {}).get("train") or {}
    text, ece, sure = "", found.get("ece"), found.get("sure")
    if finite(ece):
        text = f"Confidence and share of right ones differ by {100 * ece:.1f} points on average."
    if sure:
        least, right = sure["low"], percent(sure["right"])
        text += f" Of the {sure['n']:,} with confidence {least:g} or more {right} % are right."
    noise = run.metrics.get("outliers", {}).get("train", {}).get("noise")
    if "extended" in run.metrics:
        counted = run.assignments.members.items()
        noise = sum(count for (cluster, _), count in counted if cluster == "-1")
    threshold = run.config.get("settings", {}).get("NOISE_THRESHOLD")
    return {
        "reliability": figures.reliability_diagram(found.get("bins", [])),
        "reliability_text": text,
        "outlying": run.assignments.rows(extreme_rows(run.assignments, "outlier", -1)),
        "noise_text": f"{noise:,} lie beyond the threshold of {threshold:g} and count as noise."
        if noise is not None and finite(threshold)
        else "None is called noise: NOISE_THRESHOLD is not set.",
    }


def _header(run: RunResults, labelled: bool, noun: str) -> dict[str, Any]:
    """The headline, the sentence below it, and the tiles with the main numbers."""
    metrics = run.metrics
    data, seconds = metrics.get("dataset", {}), metrics.get("seconds", {})
    table = metrics.get("table", [])
    n = data.get("n_train")
    count = f"{n:,} {noun}s" if isinstance(n, int) else f"{noun}s"
    scored = data.get("n_labelled")
    scored = count if scored == n else f"the {scored:,} labelled {noun}s (of {n:,})"
    k = len(metrics.get("cluster_sizes", [])) or data.get("n_classes")
    scores = {(row.get("name"), row["split"]): row for row in table}
    answer = scores.get((ANSWER, "train")) or next(
        (row for row in table if row.get("name") not in (*BASELINES, BOUND)), {}
    )
    total: Any = seconds.get("total")
    lead: list[str] = []
    if "extended" in metrics:
        headline = extension_text(metrics)
        lead.append(f"They were added to the run {base_name(metrics['extended']['run'])}.")
    elif labelled and finite(answer.get("acc")):
        headline = f"{percent(answer['acc'])} % of {scored} in the right cluster, without a label"
    else:
        headline = f"{count} sorted into {k or 'some'} clusters, without a label".capitalize()
        lead.append("No label is known here, so there is no accuracy to report.")
    if (interval := likely_range(metrics)) and "extended" not in metrics:
        headline += f" (found {k} clusters; {interval})"
    confidence = _confidence(run)
    if lost := data.get("unreadable"):
        lead.append(f"Not readable and left out: {lost:,} {noun}{'s' if lost > 1 else ''}.")
    if finite(total):
        lead.append(f"The whole run took {duration(total)}.")

    held_out = scores.get((answer.get("name"), "test"), {})
    tiles = _tiles(metrics, answer if labelled else None, held_out, k, confidence)
    teacher = metrics.get("teacher", {}).get("name")
    eyebrow = [str(data.get("name", run.path.name)), f"teacher {teacher}" if teacher else "",
               f"run {run.path.name}"]  # fmt: skip
    return {
        "eyebrow": " · ".join(part for part in eyebrow if part),
        "headline": headline,
        "lead": " ".join(lead),
        "tiles": tiles,
    }


def _tiles(
    metrics: dict[str, Any],
    answer: dict[str, Any] | None,
    held_out: dict[str, Any],
    k: int | None,
    confidence: float | None,
) -> list[dict[str, str]]:
    """The main numbers: the answer's scores, or how many clusters there are where none is known."""
    shares: dict[str, Any] = (
        {}
        if answer is None
        else {
            "accuracy (Hungarian)": answer.get("acc"),
            "NMI": answer.get("nmi"),
            "ARI": answer.get("ari"),
            "accuracy on held-out data": held_out.get("acc"),
            "k-NN on the embeddings, with labels": metrics.get("knn_accuracy"),
            "linear probe on the embeddings, with labels": (metrics.get("linear_probe") or {}).get(
                "accuracy"
            ),
        }
    )
    shares["mean confidence"] = confidence
    tiles = [{"name": "clusters", "value": str(k), "unit": ""}] if k and answer is None else []
    for name, share in shares.items():
        if finite(share):
            tiles.append({"name": name, "value": percent(share), "unit": "%"})
    total: Any = metrics.get("seconds", {}).get("total")
    if finite(total):
        value, _, unit = duration(total).partition(" ")
        tiles.append({"name": "from start to report", "value": value, "unit": unit})
    return tiles


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row a method, three columns a split."""
    splits = list(dict.fromkeys(row["split"] for row in rows))
    names = list(dict.fromkeys(str(row.get("name")) for row in rows))
    found = {(str(row.get("name")), row["split"]): row for row in rows}
    result = []
    for name in names:
        cells = []
        for split in splits:
            row = found.get((name, split), {})
            for key in ("acc", "nmi", "ari"):
                value: Any = row.get(key)
                width = round(100 * max(0.0, value)) if key == "acc" and finite(value) else 0
                text = percent(value) if finite(value) else DASH
                cells.append({"text": text, "width": width})
        notes = dict.fromkeys(
            r["note"] for (n, _), r in found.items() if n == name and r.get("note")
        )
        kind = "ours" if name == ANSWER else "base" if name in BASELINES else ""
        kind = "bound" if "upper bound" in name else kind
        result.append({"name": name, "note": "; ".join(notes), "cells": cells, "kind": kind})
    titles = {"train": "training data", "test": "held-out data"}
    titles |= {split: "new data" for split in splits if split.startswith("extend")}
    return {"splits": [titles.get(split, split) for split in splits], "rows": result}


def _sizes(sizes: list[int]) -> tuple[str, list[str]]:
    """A sentence on the sizes of the clusters, and warnings where they look wrong."""
    if not sizes or not sum(sizes):
        return "", []
    effective, warnings = float(effective_clusters(sizes)), []
    empty = [k for k, size in enumerate(sizes) if size == 0]
    if collapsed(sizes):
        warnings.append(
            f"Collapse: the effective number of clusters is {effective:.1f} of {len(sizes)}. Try "
            "fewer clusters, or another seed."
        )
    if empty:
        listed = ", ".join(map(str, empty[:12])) + (" …" if len(empty) > 12 else "")
        verb = "is empty" if len(empty) == 1 else "are empty"
        warnings.append(f"{len(empty)} of {len(sizes)} clusters {verb}: {listed}.")
    text = (
        f"From {min(sizes):,} to {max(sizes):,} samples; effective number of clusters: "
        f"{effective:.1f} of {len(sizes)}."
    )
    return text, warnings


def _training(run: RunResults, heads: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the training took and which heads came of it."""
    steps = run.metrics.get("steps") or (run.steps[-1].get("step") if run.steps else None)
    looks, rate = run.metrics.get("convergence") or {}, run.metrics.get("success_rate")
    return {
        "steps": steps,
        "heads": len(heads) or None,
        "heads chosen for the answer": sum(bool(h.get("chosen")) for h in heads) or None,
        "heads that collapsed": sum(bool(h.get("collapsed")) for h in heads) if heads else None,
        "neighbour information settled by step": next(reversed(looks), None),
        "head updates that went through, %": 100 * rate if finite(rate) else None,
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


def _class_names(run: RunResults) -> list[str]:
    """The name of each class, its number where it has none."""
    names = run.metrics.get("dataset", {}).get("class_names")
    names = names or range(len(run.arrays.get("confusion", ())))
    on_map = run.arrays.get("map_label") if "map" in run.arrays else None
    n = max(len(names), 0 if on_map is None else int(on_map.max(initial=-1)) + 1)
    return [*map(str, names), *map(str, range(len(names), n))]


def _confidence(run: RunResults) -> float | None:
    values = run.assignments.confidence
    if "extended" in run.metrics:
        values = run.assignments.numbers.get("confidence")
    return None if values is None or not len(values) else float(np.nanmean(values))


def _order(value: Any) -> float:
    return -value if finite(value) else math.inf
