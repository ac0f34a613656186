"""Write the page that shows two clustering runs side by side."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from ssl_kd.core.files import atomic_write_text
from ssl_kd.core.pages.rendering import rendered
from ssl_kd.core.pages.wording import percent
from ssl_kd.vision.evaluate import METRICS
from ssl_kd.vision.report.gallery import strip
from ssl_kd.vision.samples import Samples

logger = logging.getLogger(__name__)

PRINTED = 5  # splits and merges on the terminal


def write_comparison(comparison: dict[str, Any], a: Samples, b: Samples, path: Path) -> None:
    """Write the result of `compare_runs` as a self-contained page, and as JSON beside it."""
    pictures, missing = [], ""
    try:
        for group in comparison["differences"]:
            rows = (a, group["rows"]), (a, group["typical_a"]), (b, group["typical_b"])
            pictures.append([strip(samples, of_group) for samples, of_group in rows])
    except Exception as error:  # the images may no longer exist; the numbers remain
        pictures = [[[]] * 3 for _ in comparison["differences"]]
        missing = f"There are no pictures: {type(error).__name__}: {error}."
        logger.warning("the comparison has no pictures: %s", error)
    sides = {letter: comparison[letter.lower()] for letter in "AB"}
    headline, *lead = comparison["sentences"]
    content = {
        "title": f"{sides['A']['name']} and {sides['B']['name']} · ssl_kd",
        "eyebrow": " · ".join(f"{letter}: {_about(side)}" for letter, side in sides.items()),
        "headline": headline,
        "lead": " ".join(lead),
        "pictures": pictures,
        "missing": missing,
        "percent": percent,
        "metrics": METRICS,
        "folder": f"{sides['A']['run']} and {sides['B']['run']}",
    }
    atomic_write_text(path, rendered("ssl_kd_explore", "comparison.html", comparison | content))
    atomic_write_text(path.with_suffix(".json"), json.dumps(comparison, indent=1) + "\n")


def summary(comparison: dict[str, Any]) -> list[str]:
    """Return the lines that the command prints."""
    divided = [split["text"] for split in comparison["splits"] + comparison["merges"]]
    lines = [*comparison["sentences"], *divided[:PRINTED], comparison["judgement"]["verdict"]]
    if labels := comparison["labels"]:
        a, b = (percent(labels[key]["acc"]) for key in "ab")
        lines.append(f"By the {labels['known']:,} known labels: accuracy of A {a} %, of B {b} %.")
    return lines


def _about(side: dict[str, Any]) -> str:
    teacher = f", teacher {side['teacher']}" if side["teacher"] else ""
    return f"{side['name']}{teacher}, {side['samples']:,} samples"
