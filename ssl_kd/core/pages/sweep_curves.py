"""Show a run among the others of its sweep: a section of its report, kept up to date."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from markupsafe import Markup, escape
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ssl_kd.core.files import CorruptFileError, atomic_write_text
from ssl_kd.core.pages.curves import (
    SIZE,
    axes_over_steps,
    interval_means,
    log_if_wide,
    mark_events,
)
from ssl_kd.core.pages.figures import ACCENT, MUTED, svg
from ssl_kd.core.pages.rendering import rendered
from ssl_kd.core.pages.run_files import RunFiles
from ssl_kd.core.pages.wording import DASH, amount, finite
from ssl_kd.core.runs.sweeps import PLAN, is_finished, read_failure, settings_of_runs

logger = logging.getLogger(__name__)

MOST = 50  # other runs that are drawn
_BEGIN, _END = "<!-- the sweep -->", "<!-- end of the sweep -->"
LOSS, INFORMATION = "Loss, median over the heads", "Neighbor information, nats"
TRAIN_LOSS, PERPLEXITY = "Training loss", "Held-out perplexity"

Curve = tuple[NDArray, NDArray]
"""Steps and values `[n]` of a measure."""


@dataclass(frozen=True)
class SweepCurves:
    """The curves of the finished runs of a sweep.

    Attributes:
        name: of the sweep, that of its folder.
        settings: run -> its own settings, of all runs of the plan.
        curves: finished run -> title -> curve.
        failed: run that failed, or whose files cannot be read -> why.
        n_unfinished: number of runs that are neither finished nor failed.
    """

    name: str
    settings: Mapping[str, Mapping[str, str]]
    curves: Mapping[str, Mapping[str, Curve]]
    failed: Mapping[str, str]
    n_unfinished: int

    @classmethod
    def read(cls, folder: Path) -> SweepCurves:
        """Read the runs in the folder of a sweep.

        Raises:
            CorruptFileError: the plan of the sweep is damaged.
        """
        settings = settings_of_runs(folder)
        curves: dict[str, dict[str, Curve]] = {}
        failed: dict[str, str] = {}
        for name in settings:
            try:
                if is_finished(folder / name):
                    curves[name] = curves_of(RunFiles.read(folder / name))
                elif failure := read_failure(folder, name):
                    failed[name] = failure[1]
            except (OSError, ValueError, CorruptFileError) as error:
                failed[name] = f"its files cannot be read: {error}"
        n_unfinished = len(settings) - len(curves) - len(failed)
        return cls(folder.resolve().name, settings, curves, failed, n_unfinished)

    def section(self, run: RunFiles) -> str:
        """Return the HTML of the section in the report of `run`, one of the sweep."""
        own_name, own = run.path.resolve().name, curves_of(run)
        others = [name for name in self.curves if name != own_name]
        drawn = _spread(others, MOST)
        curves = {name: self.curves[name] for name in drawn} | {own_name: own}
        section = {
            "name": self.name,
            "text": self._text(own_name, len(others), len(drawn)),
            "figures": [
                {"title": title, "figure": self._figure(title, curve, drawn, run.events)}
                for title, curve in own.items()
            ],
            "titles": list(own),
            "rows": [
                {
                    "name": name,
                    "link": "" if name == own_name else _report_of(name),
                    "values": [_last(curves[name].get(title)) for title in own],
                }
                for name in self.settings
                if name in curves
            ],
            "failed": [(name, why) for name, why in self.failed.items() if name != own_name],
        }
        html = rendered("ssl_kd.core.pages", "sweep.html", {"sweep": section})
        return f"{_BEGIN}{html}{_END}"

    def _text(self, own_name: str, n_others: int, n_drawn: int) -> str:
        own = self.settings[own_name]
        values = ", ".join(f"{field.upper()} {value}" for field, value in own.items())
        text = f"This run has {values}."
        if n_others:
            others = f"the {n_others:,} other finished runs" if n_others > 1 else "the other run"
            if n_drawn < n_others:
                others = f"{n_drawn} of {others}, evenly spread over the sweep"
            text += f" Gray lines are {others}; click one for its report."
            if set(own) - {"seed"}:
                text += " Where a setting changes the loss itself, compare courses, not heights."
        if self.n_unfinished:
            text += f" Not finished yet: {self.n_unfinished:,}."
        return text

    def _figure(
        self, title: str, own: Curve, names: Sequence[str], events: Sequence[dict[str, Any]]
    ) -> Markup:
        others = {name: self.curves[name][title] for name in names if title in self.curves[name]}
        values = np.concatenate([own[1], *(y for _, y in others.values())])

        def draw(figure: Figure) -> None:
            is_perplexity = title == PERPLEXITY
            axes = axes_over_steps(figure, None if is_perplexity else values)
            for name, (x, y) in others.items():
                axes.plot(x, y, color=MUTED, lw=0.8, alpha=0.5, url=_report_of(name))
            axes.plot(*own, color=ACCENT, lw=2.2, label="this run")
            if others:
                axes.plot([], [], color=MUTED, lw=0.8, label=f"{len(others)} others")
            if is_perplexity:
                log_if_wide(axes, values)
            mark_events(axes, events, own[0], own[1][:, None])
            axes.legend(loc="best", labelcolor=MUTED)

        figure = svg(draw, SIZE, f"{title} of this run among others of its sweep")
        # The name of a run appears above its line.
        return Markup(re.sub(r'<a xlink:href="\.\./([^/"]+)/[^>]*>', _with_title, figure))


def section_of(run: RunFiles) -> Markup:
    """Return the HTML of the section on the sweep of a run; empty if it is of none.

    Raises:
        CorruptFileError: the plan of the sweep is damaged.
    """
    path = run.path.resolve()
    if not (path.parent / PLAN).exists() or path.name not in settings_of_runs(path.parent):
        return Markup()
    return Markup(SweepCurves.read(path.parent).section(run))


def update_reports(folder: Path) -> None:
    """Draw the curves of a sweep anew in the reports of its finished runs.

    No other part of a report changes.

    Raises:
        CorruptFileError: the plan of the sweep is damaged.
    """
    sweep = SweepCurves.read(folder)
    for name in sweep.curves:
        report = folder / name / "report.html"
        if not report.exists():
            continue
        text = report.read_text(encoding="utf-8")
        before, begin, rest = text.partition(_BEGIN)
        _, end, after = rest.partition(_END)
        if not (begin and end):
            logger.info("%s has no curves of the sweep: ssl_kd report %s", report, report.parent)
            continue
        section = sweep.section(RunFiles.read(report.parent))
        atomic_write_text(report, before + section + after)


def curves_of(run: RunFiles) -> dict[str, Curve]:
    """Return title -> curve of a run, as means over intervals; a title needs a finite value."""
    points: dict[str, list[tuple[float, float]]] = {}
    for line in run.steps:
        step = line.get("step")
        if not finite(step):
            continue
        if isinstance(loss := line.get("loss"), list):
            known = [value for value in loss if finite(value)]
            points.setdefault(LOSS, []).append((step, float(np.median(known)) if known else np.nan))
        elif "train_loss" in line:
            value = line["train_loss"]
            points.setdefault(TRAIN_LOSS, []).append((step, value if finite(value) else np.nan))
        elif isinstance(line.get("eval"), dict) and finite(value := line["eval"].get("perplexity")):
            points.setdefault(PERPLEXITY, []).append((step, value))
    looks = run.metrics.get("convergence") or {}
    points[INFORMATION] = sorted((float(step), value) for step, value in looks.items())
    curves: dict[str, Curve] = {}
    for title, pairs in points.items():
        x, y = np.array(pairs, float).reshape(-1, 2).T
        if np.isfinite(y).any():
            steps, means = interval_means(x.tolist(), y[:, None])
            curves[title] = steps, means[:, 0]
    return curves


def _spread(names: Sequence[str], most: int) -> list[str]:
    """Return at most `most` names, evenly spread."""
    n = min(most, len(names))
    return [names[i * len(names) // n] for i in range(n)]


def _report_of(name: str) -> str:
    """Return the link from the report of a run to that of another."""
    return f"../{quote(name)}/report.html"


def _with_title(link: re.Match[str]) -> str:
    return f"{link[0]}<title>{escape(unquote(link[1]))}</title>"


def _last(curve: Curve | None) -> str:
    known = [] if curve is None else curve[1][np.isfinite(curve[1])]
    return amount(float(known[-1])) if len(known) else DASH
