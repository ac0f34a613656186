"""Write a table of groups of runs: for the terminal, or as CSV, Markdown or LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from ssl_kd.core.errors import InputError, printable
from ssl_kd.core.pages.tables import new_table
from ssl_kd.core.settings import nearest
from ssl_kd.sweep.records import Record, Unfinished
from ssl_kd.sweep.statistics import Difference, Group, Mean, baseline, best, differences, grouped

FORMATS = ("terminal", "csv", "markdown", "latex")
SUFFIXES = {".csv": "csv", ".md": "markdown", ".tex": "latex"}
SHARES = {"acc", "nmi", "ari", "ami", "knn_accuracy", "linear_probe", "success_rate", "agreement"}
SHARES |= {"acceptance", "ece", "repetition", "answer_accuracy", "answer_rate"}
_TITLES = {
    "acc": "ACC",
    "nmi": "NMI",
    "ari": "ARI",
    "ami": "AMI",
    "knn_accuracy": "k-NN",
    "linear_probe": "linear probe",
    "bits_per_byte": "bits per byte",
    "kl": "KL",
    "nll": "NLL",
    "ece": "ECE",
}
_DIGITS = {"perplexity": 2, "nll": 3, "bits_per_byte": 3, "kl": 4, "criterion": 3, "seconds": 0}
_USUAL = ("acc", "nmi", "ari", "knn_accuracy", "linear_probe", "criterion", "perplexity")
_USUAL += ("bits_per_byte", "kl", "ece", "answer_accuracy", "faults", "seconds")
_NOT_COMPARED = ("faults", "seconds")  # no seed makes runs alike in these
SIGNIFICANT = 0.05
_LATEX = {character: f"\\{character}" for character in "&%$#_{}"}
_LATEX |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_LATEX |= {character: f"${character}$" for character in "<>|"} | {"±": r"$\pm$"}


@dataclass(frozen=True)
class RunTable:
    """Groups of runs, the scores that are shown, and the group that others are compared with."""

    groups: Sequence[Group]
    scores: Sequence[str]
    base: Group
    unfinished: Sequence[Unfinished]

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        unfinished: Sequence[Unfinished] = (),
        *,
        scores: Sequence[str] = (),
        against: str | None = None,
    ) -> RunTable:
        """Group the runs, and choose the columns: `scores`, or the usual ones that runs have.

        Raises:
            InputError: there is no finished run, no run has one of the scores, or `against` does
                not fit one group.
        """
        if not records:
            why = "; ".join(f"{run.path}: {run.why}" for run in unfinished[:3])
            raise InputError(f"None of {len(unfinished)} runs is finished ({why})")
        known = dict.fromkeys(score for record in records for score in record.scores)
        for score in scores:
            if score not in known:
                raise InputError(
                    f"No run has the score {score!r}; known: {', '.join(known)}."
                    f"{nearest(score, known)}"
                )
        groups = grouped(records)
        columns = list(dict.fromkeys(scores)) or [score for score in _USUAL if score in known]
        return cls(groups, columns, baseline(groups, against), unfinished)

    @property
    def commits(self) -> list[str]:
        """The commits of all runs, each once."""
        found = (record.commit for group in self.groups for record in group.records)
        return list(dict.fromkeys(commit or "unknown" for commit in found))

    @property
    def notes(self) -> list[str]:
        """Sentences below the table: what was left out, and what was compared."""
        sizes = {len(group.seeds) for group in self.groups}
        notes = []
        if max(sizes) > 1:
            notes.append("Mean and half of its 95 % interval (Student's t) over the seeds.")
        if len(sizes) > 1:
            notes.append("The groups have different numbers of seeds.")
        if any(len(group.records) > len(group.seeds) for group in self.groups):
            notes.append("Several runs have the same seed: they count once, by their mean.")
        if len(self.commits) > 1:
            notes.append(f"The runs are of {len(self.commits)} commits: {', '.join(self.commits)}.")
        return notes + [f"Left out: {run.path}: {run.why}" for run in self.unfinished]

    def compared(self, score: str) -> list[Difference | None]:
        """Return the paired difference of each group from the baseline."""
        return differences(self.groups, self.base, score)

    @property
    def compared_scores(self) -> list[str]:
        """The scores in which groups differ from the baseline on a common seed."""
        return [
            score
            for score in self.scores
            if score not in _NOT_COMPARED
            and any(d and (d.mean.value or d.mean.half) for d in self.compared(score))
        ]


def title(score: str) -> str:
    """Return the heading of a score's column; shares are shown in percent."""
    name = _TITLES.get(score, score.replace("_", " "))
    return f"{name}, %" if score in SHARES else name


def shown(score: str, mean: Mean | None, *, signed: bool = False) -> str:
    """Return a mean as text, `89.8 ± 0.4`; `-` if there is none.

    Without `±`, there is a single value, or all of them are equal.
    """
    if mean is None:
        return "-"
    factor, digits = (100, 1) if score in SHARES else (1, _DIGITS.get(score, 1))
    sign = "+" if signed else ""
    text = f"{factor * mean.value:{sign}.{digits}f}"
    return f"{text} ± {factor * mean.half:.{digits}f}" if mean.half else text


def terminal_tables(table: RunTable) -> list[tuple[str, Table]]:
    """Return the table of means, and that of the differences, each with its heading."""
    tables = []
    for heading, head, rows in _tables(table):
        drawn = new_table(None, head[0])
        for name in head[1:]:
            drawn.add_column(name, justify="right")
        for row in rows:
            drawn.add_row(*(Text(text, "bold" if bold else "") for text, bold in row))
        tables.append((heading, drawn))
    return tables


def markdown(table: RunTable) -> str:
    """Return the tables in Markdown, with the runs and commands behind each row."""
    blocks = []
    for heading, head, rows in _tables(table):
        body = [[_bold(text) if bold else text for text, bold in row] for row in rows]
        align = ["---", *["---:"] * (len(head) - 1)]
        lines = ["| " + " | ".join(map(_markdown, cells)) + " |" for cells in [head, align, *body]]
        blocks.append("\n".join([*([f"{heading}\n"] if heading else []), *lines]))
    blocks += table.notes
    blocks.append("\n".join(f"- {_markdown(line)}" for line in provenance(table)))
    return "\n\n".join(blocks) + "\n"


def latex(table: RunTable) -> str:
    """Return the tables for LaTeX with booktabs; comments name the runs and commands."""
    lines = [f"% {line}" for line in [*table.notes, *provenance(table)]]
    for heading, head, rows in _tables(table):
        if heading:
            lines.append(f"% {heading}")
        lines += [f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", "\\toprule"]
        lines.append(" & ".join(map(_latex, head)) + " \\\\")
        lines.append("\\midrule")
        for row in rows:
            cells = [f"\\textbf{{{_latex(t)}}}" if bold else _latex(t) for t, bold in row]
            lines.append(" & ".join(cells) + " \\\\")
        lines += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join(lines) + "\n"


def comma_separated(table: RunTable) -> str:
    """Return a row for each group, with unrounded numbers; shares are between 0 and 1."""
    rows: list[dict[str, Any]] = []
    compared = {score: table.compared(score) for score in table.scores}
    for i, group in enumerate(table.groups):
        row: dict[str, Any] = {name.lower(): value for name, value in group.settings.items()}
        row["seeds"], row["runs"] = len(group.seeds), len(group.records)
        for score in table.scores:
            mean, difference = group.mean(score), compared[score][i]
            row[score] = mean and mean.value
            row[f"{score}_interval"] = mean and mean.half
            row[f"{score}_difference"] = difference and difference.mean.value
            row[f"{score}_difference_interval"] = difference and difference.mean.half
            row[f"{score}_p"] = difference and difference.p
        row["commits"] = " ".join(dict.fromkeys(r.commit or "unknown" for r in group.records))
        row["folders"] = " ".join(str(r.path) for r in group.records)
        row["commands"] = "; ".join(r.command for r in group.records)
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def provenance(table: RunTable) -> list[str]:
    """Return a line for each run: its group, commit, folder and command."""
    return [
        printable(
            f"{group.name}: commit {record.commit or 'unknown'}, {record.path}: {record.command}"
        )
        for group in table.groups
        for record in group.records
    ]


Row = list[tuple[str, bool]]
"""The cells of a row, each with whether it is bold."""


def _tables(table: RunTable) -> list[tuple[str, list[str], list[Row]]]:
    """Return heading, columns and rows of the means, and of the differences."""
    names = list(table.groups[0].settings)
    labels = [[str(group.settings[name]) for name in names] for group in table.groups]
    if not names:
        names, labels = ["RUNS"], [["all"]]
    head = [name.lower() for name in names]
    winners = {score: best(table.groups, score) for score in table.scores}
    means: list[Row] = []
    for label, group in zip(labels, table.groups, strict=True):
        cells = [
            (shown(score, group.mean(score)), any(group is winner for winner in winners[score]))
            for score in table.scores
        ]
        means.append([*((text, False) for text in label), (f"{len(group.seeds)}", False), *cells])
    columns = [title(score) for score in table.scores]
    found = [("", [*head, "n", *columns], means)]
    if scores := table.compared_scores:
        compared = [table.compared(score) for score in scores]
        rows = [
            [*((text, False) for text in label), *_changes(scores, of_group)]
            for label, of_group in zip(labels, zip(*compared, strict=True), strict=True)
            if any(of_group)
        ]
        heading = (
            f"Difference from {table.base.name}, paired by seed (*: p < {SIGNIFICANT}, paired "
            "t-test with Holm's correction)"
        )
        found.append((heading, [*head, *map(title, scores)], rows))
    return found


def _changes(scores: Sequence[str], of_group: Sequence[Difference | None]) -> Row:
    cells: Row = []
    for score, difference in zip(scores, of_group, strict=True):
        significant = bool(difference and difference.p is not None and difference.p < SIGNIFICANT)
        mean = difference.mean if difference else None
        cells.append((shown(score, mean, signed=True) + ("*" if significant else ""), significant))
    return cells


def _bold(text: str) -> str:
    """Return a cell in bold in Markdown; the asterisk of a significant difference is after it."""
    number = text.removesuffix("*")
    return f"**{number}**" + ("\\*" if number != text else "")


def _markdown(text: str) -> str:
    return text.replace("|", "\\|")


def _latex(text: str) -> str:
    escaped = re.sub(r"\W|_", lambda match: _LATEX.get(match[0], match[0]), text)
    return re.sub(r"^-(?=\d)", "$-$", escaped)  # a minus sign, not a hyphen
