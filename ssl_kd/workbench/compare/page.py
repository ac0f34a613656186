"""Write the page that shows two clustering runs side by side."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jinja2
from PIL import Image

from ssl_kd.datasets.decode import decoded
from ssl_kd.files import atomic_write_text
from ssl_kd.report.gallery import thumbnail
from ssl_kd.report.wording import percent

logger = logging.getLogger(__name__)

PRINTED = 5  # splits and merges on the terminal
OpenImage = Callable[[int], Image.Image | None]
"""A function from a row of a run to its picture; None if it has none."""


def write_comparison(
    comparison: dict[str, Any], image_a: OpenImage, image_b: OpenImage, path: Path
) -> None:
    """Write the result of `compare_runs` as a self-contained page, and as JSON beside it."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ssl_kd.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    differences = [
        one | {f"name_{side}": _cluster(comparison, side, one[side]) for side in "ab"}
        for one in comparison["differences"]
    ]
    pictures, missing = _pictures(differences, image_a, image_b)
    headline, *rest = _agreement_sentences(comparison)
    page = environment.get_template("comparison.html").render(
        title=f"{comparison['a']['name']} and {comparison['b']['name']} · ssl_kd",
        eyebrow=" · ".join(_about(name, comparison[name.lower()]) for name in "AB"),
        headline=headline,
        lead=" ".join(rest),
        verdict=comparison["judgement"],
        divided=divided_sentences(comparison),
        differences=pictures,
        missing=missing,
        labels=_label_rows(comparison),
        folder=f"{comparison['a']['run']} and {comparison['b']['run']}",
    )
    atomic_write_text(path, page)
    atomic_write_text(path.with_suffix(".json"), json.dumps(comparison, indent=1) + "\n")


def summary(comparison: dict[str, Any]) -> list[str]:
    """Return the lines that the command prints."""
    lines = [*_agreement_sentences(comparison), *divided_sentences(comparison)[:PRINTED]]
    lines.append(comparison["judgement"]["verdict"])
    if labels := comparison["labels"]:
        a, b = (percent(labels[key]["acc"]) for key in "ab")
        lines.append(f"By the {labels['known']:,} known labels: accuracy of A {a} %, of B {b} %.")
    return lines


def _agreement_sentences(comparison: dict[str, Any]) -> list[str]:
    """Return sentences on how far two runs agree, the most important first."""
    a, b, agreement = comparison["a"], comparison["b"], comparison["agreement"]
    lines = [
        f"A and B agree on {percent(agreement['matched'])} % of {comparison['samples']:,} samples."
    ]
    lines.append(
        f"AMI {agreement['ami']:.3f}, ARI {agreement['ari']:.3f}; "
        f"A has {a['clusters']} clusters, B {b['clusters']}."
    )
    lacking = [("A", b["missing_in_other"]), ("B", a["missing_in_other"])]
    if any(n for _, n in lacking):
        text = " and ".join(f"{name} lacks {n:,} samples of the other" for name, n in lacking if n)
        lines.append(f"{text}.")
    if left_out := comparison["without_cluster"]:
        lines.append(f"{left_out:,} common samples are excluded or have no cluster in one of them.")
    return lines


def divided_sentences(comparison: dict[str, Any]) -> list[str]:
    """Return sentences such as `3 of A (412) is 7 (300) and 9 (105) of B`."""
    sentences = []
    for key, of, other in (("splits", "a", "b"), ("merges", "b", "a")):
        for one in comparison[key]:
            whole = f"{_cluster(comparison, of, one['cluster'])} of {of.upper()}"
            *parts, last = (
                f"{_cluster(comparison, other, part['cluster'])} ({part['samples']:,})"
                for part in one["parts"]
            )
            text = f"{', '.join(parts)} and {last} of {other.upper()}"
            sentences.append(f"{whole} ({one['samples']:,}) is {text}")
    return sentences


def _cluster(comparison: dict[str, Any], side: str, number: int) -> str:
    """Return the number of a cluster, with its name if it has one."""
    name = comparison[side]["names"].get(str(number))
    return f"{number} {name}" if name else str(number)


def _about(name: str, side: dict[str, Any]) -> str:
    teacher = f", teacher {side['teacher']}" if side["teacher"] else ""
    return f"{name}: {side['name']}{teacher}, {side['samples']:,} samples"


def _label_rows(comparison: dict[str, Any]) -> list[tuple[str, list[str]]]:
    labels = comparison["labels"]
    if labels is None:
        return []
    return [
        (name, [percent(labels[name.lower()][score]) for score in ("acc", "nmi", "ari")])
        for name in "AB"
    ]


def _pictures(
    differences: Iterable[dict[str, Any]], image_a: OpenImage, image_b: OpenImage
) -> tuple[list[dict[str, Any]], str]:
    """Return the differences with their pictures, and why pictures are missing."""
    shown, missing = [], ""
    cache: dict[tuple[OpenImage, int], dict[str, str] | None] = {}

    def strip(open_image: OpenImage, rows: list[int]) -> list[dict[str, str]]:
        for row in rows:
            if (open_image, row) not in cache:
                image = decoded(open_image, row)
                cache[open_image, row] = None if image is None else thumbnail(image)
        return [p | {"name": f"row {row}"} for row in rows if (p := cache[open_image, row])]

    for one in differences:
        of_sides = {"a": [], "b": [], "group": []}
        try:
            if not missing:
                of_sides = {
                    "a": strip(image_a, one["typical_a"]),
                    "b": strip(image_b, one["typical_b"]),
                    "group": strip(image_a, one["rows"]),
                }
        except Exception as error:  # the images may no longer exist; the numbers remain
            missing = f"There are no pictures: {type(error).__name__}: {error}."
            logger.warning("the comparison has no pictures: %s", error)
        shown.append(one | {"pictures": of_sides})
    return shown, missing
