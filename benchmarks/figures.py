"""Draw the figures of docs/results.md from the tables on that page.

python -m benchmarks.figures  # after a table changed; writes docs/figures/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.turns import PAGE, section_of

FOLDER = PAGE.parent / "figures"
OURS, OTHERS, LIGHT = "#d1495b", "#3b6ea5", "#a9bcd0"
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


class Table(NamedTuple):
    """A Markdown table: the names of its columns, and the texts of its rows."""

    columns: Sequence[str]
    rows: Sequence[Mapping[str, str]]


def table_with(page: str, *columns: str) -> Table:
    """Return the only table of a Markdown page that has all these columns.

    Raises:
        ValueError: If no table or several tables have them.
    """
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", page, re.M):
        lines = [
            [cell.strip().replace("*", "").replace("`", "") for cell in line.split("|")[1:-1]]
            for line in block.splitlines()
        ]
        header, _, *rows = lines
        if set(columns) <= set(header):
            found.append(Table(header, [dict(zip(header, row, strict=True)) for row in rows]))
    if len(found) != 1:
        raise ValueError(f"{len(found)} tables have the columns {columns}; expected 1")
    return found[0]


def number(text: str) -> float:
    """Return the first number in a cell, without its thousands separators."""
    match = NUMBER.search(text)
    if match is None:
        raise ValueError(f"the cell {text!r} has no number")
    return float(match[0].replace(",", ""))


def regret(page: str, figure: Figure) -> None:
    """Draw how far each method is behind the best one: median, mean and worst set."""
    table = table_with(section_of("natural", page), "method", "mean regret", "worst", "median")
    rows = sorted(table.rows, key=lambda row: -number(row["mean regret"]))
    axes = _rows(figure, [row["method"] for row in rows])
    for place, row in enumerate(rows):
        color = OURS if row["method"] == "ssl_kd" else OTHERS
        worst = number(row["worst"])
        axes.plot([number(row["median"]), worst], [place, place], color=LIGHT, zorder=1)
        axes.scatter(number(row["median"]), place, marker="|", s=120, color=color)
        axes.scatter(number(row["mean regret"]), place, s=50, color=color)
        axes.scatter(worst, place, marker="x", s=40, color=color)
    axes.set_xlim(left=0)
    axes.set_xlabel("points of accuracy behind the best method of a set")
    axes.set_title("bar: median set, dot: mean, cross: worst set", fontsize=9, loc="left")


def each_set(page: str, figure: Figure) -> None:
    """Draw our accuracy minus that of the best peer, for each set."""
    table = table_with(section_of("natural", page), "set", "best peer", "ahead")
    rows = sorted(table.rows, key=lambda row: number(row["ahead"]))
    differences = [number(row["ahead"]) for row in rows]
    axes = _rows(figure, [row["set"] for row in rows])
    axes.barh(range(len(rows)), differences, color=[OURS if d < 0 else OTHERS for d in differences])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("our accuracy minus that of the best peer, in points")


def number_of_clusters(page: str, figure: Figure) -> None:
    """Draw the number of clusters found, relative to the number of classes."""
    table = table_with(page, "set", "classes", "EVoC", "Leiden", "ssl_kd")
    axes = _rows(figure, [f"{row['set']} ({row['classes']})" for row in table.rows])
    colors = {"EVoC": LIGHT, "Leiden": OTHERS, "ssl_kd": OURS}
    for shift, (method, color) in enumerate(colors.items(), -1):
        for place, row in enumerate(table.rows):
            counts = [int(count) / int(row["classes"]) for count in row[method].split(",")]
            label = method if place == 0 else None
            heights = [place + 0.22 * shift] * len(counts)
            axes.scatter(counts, heights, s=16, color=color, label=label)
    axes.axvspan(0.8, 1.2, color="black", alpha=0.07, linewidth=0)
    axes.set_xscale("log")
    axes.set_xticks([0.2, 0.5, 1, 2, 5], labels=["1/5", "1/2", "1", "2", "5"])
    axes.minorticks_off()
    axes.set_xlabel("clusters found, relative to the number of classes (shaded: within 20 %)")
    axes.legend(loc="lower right", fontsize=8)


def calibration(page: str, figure: Figure) -> None:
    """Draw the expected calibration error before and after calibration."""
    table = table_with(page, "set", "ECE, raw", "ECE, calibrated")
    axes = _rows(figure, [row["set"] for row in table.rows])
    for place, row in enumerate(table.rows):
        raw, calibrated = number(row["ECE, raw"]), number(row["ECE, calibrated"])
        axes.plot([raw, calibrated], [place, place], color=LIGHT, zorder=1)
        axes.scatter(raw, place, color=OTHERS, label="raw vote" if place == 0 else None)
        axes.scatter(calibrated, place, color=OURS, label="calibrated" if place == 0 else None)
    axes.set_xlim(left=0)
    axes.set_xlabel("expected calibration error, in percent")
    axes.legend(fontsize=8)


def labels(page: str, figure: Figure) -> None:
    """Draw the average precision of three ways to find wrong labels."""
    tables = re.split(r"\n(?=Labels: )", page)
    table = table_with(tables[-1], "inserted", "method", "average precision")
    methods = {"ours": OURS}
    methods |= {"cleanlab, self_confidence": OTHERS, "cleanlab, normalized_margin": LIGHT}
    kinds = list(dict.fromkeys(row["inserted"] for row in table.rows))
    axes = _rows(figure, kinds)
    for row in table.rows:
        color = methods[row["method"]]
        axes.scatter(number(row["average precision"]), kinds.index(row["inserted"]), color=color)
    for method, color in methods.items():
        axes.scatter([], [], color=color, label=method)
    axes.set_xlabel("average precision, wrong labels first")
    axes.legend(fontsize=8)


def guard(page: str, figure: Figure) -> None:
    """Draw the accuracy of the healthy heads for each way to handle faulty ones."""
    rows = table_with(page, "handling", "mean ACC of the other forty").rows
    axes = _rows(figure, [row["handling"] for row in rows])
    scores = [number(row["mean ACC of the other forty"]) for row in rows]
    colors = [OURS if row["handling"] == "guard" else OTHERS for row in rows]
    axes.barh(range(len(rows)), scores, color=colors)
    axes.set_xlabel("mean accuracy of the forty healthy heads, in percent")


def nan_tools(page: str, figure: Figure) -> None:
    """Draw the faults whose operation each tool names, and the cost of a healthy step."""
    rows = table_with(page, "tool", "operation right", "CPU time of a step").rows
    named, cost = figure.subplots(1, 2)
    for axes, column in ((named, "operation right"), (cost, "CPU time of a step")):
        colors = [OURS if row["tool"] == "the guard" else OTHERS for row in rows]
        axes.barh(range(len(rows)), [number(row[column]) for row in rows], color=colors)
        axes.invert_yaxis()
    named.set_yticks(range(len(rows)), labels=[row["tool"] for row in rows], fontsize=8)
    named.set_xlabel("operation named, of 200 faults")
    cost.set_yticks([])
    cost.axvline(1, color="black", linewidth=0.8)
    cost.set_xlabel("CPU time of a step, relative to no tool")


def students(page: str, figure: Figure) -> None:
    """Draw the held-out perplexity of students that trained near the best learning rates."""
    table = table_with(page, "learning rate", "distilled", "cross-entropy alone")
    axes = figure.add_subplot()
    places = range(len(table.rows))
    for method, color in {"distilled": OURS, "cross-entropy alone": OTHERS}.items():
        scores = [number(row[method]) for row in table.rows]
        axes.plot(places, scores, marker="o", color=color, label=method)
    axes.set_xticks(places, labels=[row["learning rate"] for row in table.rows])
    axes.set_yscale("log")
    axes.set_yticks([25, 30, 40, 60, 100], labels=["25", "30", "40", "60", "100"])
    axes.minorticks_off()
    axes.set_xlabel("peak learning rate")
    axes.set_ylabel("held-out perplexity")
    axes.legend(fontsize=8)


def caches(page: str, figure: Figure) -> None:
    """Draw what a cached teacher costs in perplexity, against its bytes per token."""
    rows = table_with(page, "teacher", "relative to live", "bytes per token on disk").rows
    axes = figure.add_subplot()
    axes.axhline(1, color="black", linewidth=0.8)
    for row in rows:
        if not row["bytes per token on disk"]:
            continue
        middle, low, high = map(float, re.findall(r"\d\.\d+", row["relative to live"]))
        place = number(row["bytes per token on disk"])
        color = OURS if "default" in row["teacher"] else OTHERS
        bar = [[middle - low], [high - middle]]
        axes.errorbar(place, middle, yerr=bar, marker="o", capsize=3, color=color)
        name = row["teacher"].partition(",")[0]
        axes.annotate(
            name, (place, high), xytext=(0, 4), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_xscale("log")
    axes.set_xticks([20, 50, 100, 200, 500, 1000], labels=["20", "50", "100", "200", "500", "1000"])
    axes.minorticks_off()
    axes.margins(y=0.15)
    axes.set_xlabel("bytes per token on disk")
    axes.set_ylabel("perplexity relative to the live teacher")


def steps(page: str, figure: Figure) -> None:
    """Draw the time and memory of a training step relative to ours, by vocabulary."""
    table = table_with(page, "kind", "vocabulary", "threads", "trainer", "extra peak MiB")
    rows = [row for row in table.rows if row["threads"] == "1" and not _is_ours(row)]
    time, memory = figure.subplots(1, 2)
    colors = {"text": OURS, "on-policy": OTHERS, "served": "#6a994e"}
    for row in rows:
        marker = "s" if "GKD" in row["trainer"] else "o"
        own = next(r for r in table.rows if _same_task(r, row) and _is_ours(r))
        place, color = number(row["vocabulary"]), colors[row["kind"]]
        more_memory = number(row["extra peak MiB"]) / number(own["extra peak MiB"])
        time.scatter(place, number(row["time relative to ours"]), marker=marker, color=color)
        memory.scatter(place, more_memory, marker=marker, color=color)
    for kind, color in colors.items():
        time.scatter([], [], color=color, label=kind)
    time.scatter([], [], marker="s", color="black", label="GKDTrainer")
    for axes, name in ((time, "time of a step"), (memory, "extra memory")):
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks([4096, 32000, 128000], labels=["4,096", "32,000", "128,000"])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("vocabulary")
        axes.set_title(f"TRL: {name} relative to ours", fontsize=9, loc="left")
    time.legend(fontsize=8)


def _is_ours(row: Mapping[str, str]) -> bool:
    return row["trainer"].startswith("ours")


def _same_task(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return all(one[name] == other[name] for name in ("kind", "vocabulary", "threads"))


def _rows(figure: Figure, names: Sequence[str]) -> Axes:
    """Return axes with a row for each name, the first at the top."""
    axes = figure.add_subplot()
    axes.set_yticks(range(len(names)), labels=names, fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#eeeeee")
    axes.set_axisbelow(True)
    return axes


FIGURES: Mapping[str, tuple[Callable[[str, Figure], None], tuple[float, float]]] = {
    "regret": (regret, (7, 2.9)),
    "each_set": (each_set, (7, 6.4)),
    "number_of_clusters": (number_of_clusters, (7, 5.4)),
    "calibration": (calibration, (7, 2.8)),
    "labels": (labels, (7, 2.8)),
    "guard": (guard, (7, 2.2)),
    "nan_tools": (nan_tools, (7.4, 2.9)),
    "students": (students, (5.2, 3.2)),
    "caches": (caches, (6.2, 3.6)),
    "steps": (steps, (7.4, 3.2)),
}
"""Function that draws a figure, and the figure's size in inches, by the name of its file."""


def draw(name: str, page: str) -> Figure:
    """Draw one figure from the text of docs/results.md."""
    function, size = FIGURES[name]
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    function(page, figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(folder: Path = FOLDER) -> None:
    """Write all figures; the same tables and version of matplotlib give the same bytes."""
    page = PAGE.read_text(encoding="utf-8")
    folder.mkdir(exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "ssl_kd"}):
        for name in FIGURES:
            draw(name, page).savefig(folder / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
