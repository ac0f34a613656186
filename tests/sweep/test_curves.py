"""The report of a run shows the curves of its sweep."""

import json
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from ssl_kd.core.files import CorruptFileError
from ssl_kd.core.pages import sweep_curves
from ssl_kd.core.pages.curves import axes_over_steps, mark_events
from ssl_kd.core.pages.run_files import RunFiles
from ssl_kd.core.pages.sweep_curves import (
    INFORMATION,
    LOSS,
    PERPLEXITY,
    TRAIN_LOSS,
    SweepCurves,
    curves_of,
    section_of,
    update_reports,
)
from ssl_kd.language.report.page import write_report as write_language_report
from ssl_kd.vision.report import write_report
from tests.vision.report.reading import Reader, put

EVENT = {"step": 15, "part": "head 1", "stage": "loss", "reason": "a NaN", "action": "skipped"}


BEGIN, END = "<!-- the sweep -->", "<!-- end of the sweep -->"


def put_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def sweep(tmp_path):
    """A sweep of four runs of heads, three of them finished and one that failed."""
    folder = tmp_path / "betas"
    (folder / "logs").mkdir(parents=True)
    runs = {f"beta-0.{n}": {"beta": f"0.{n}"} for n in range(5, 9)}
    put(folder, "sweep.json", {"runs": runs})
    for number, name in enumerate(list(runs)[:3]):
        path = folder / name
        path.mkdir()
        put(path, "config.json", {"settings": {"BETA": 0.5 + number / 10}})
        put(path, "metrics.json", {"convergence": {"10": 1.0, "20": 1.5 + number}})
        losses = [[1.0, 2.0, 6.0 + number], [0.5, None, 0.7 + number], [None, None, None]]
        lines = [{"step": 10 * i + 10, "loss": loss} for i, loss in enumerate(losses)]
        put_lines(path / "metrics.jsonl", lines)
        (path / "report.html").write_text(f"<main>{BEGIN}{END}</main>")
    put(folder / "logs", "beta-0.8.failed.json", {"code": 3, "reason": "too few <healthy> heads"})
    return folder


def section(path):
    """The part of a run's report that shows its sweep."""
    text = (path / "report.html").read_text()
    Reader(text)  # all tags are closed
    return text.partition(BEGIN)[2].partition(END)[0]


def lines_to(text):
    """The reports that gray lines lead to, once for each figure."""
    links = re.findall(r'<a xlink:href="\.\./(.*?)/report.html" [^>]*><title>(.*?)</title>', text)
    assert all(folder == name for folder, name in links)
    return [name for name, _ in links]


def test_a_report_has_this_run_in_front_and_the_others_as_lines_that_lead_to_theirs(sweep):
    update_reports(sweep)
    text = section(sweep / "beta-0.6")
    assert lines_to(text) == ["beta-0.5", "beta-0.7"] * 2
    assert "This run has BETA 0.6. Gray lines are the 2 other finished runs" in text
    assert LOSS in text and INFORMATION in text and "Not finished" not in text
    (rows,) = re.findall("<tbody>(.*)</tbody>", text, re.S)
    cells = [re.findall("<td.*?>(.*?)</td>", row) for row in rows.split("</tr>")[:-1]]
    assert [row[1:] for row in cells] == [["0.6", "1.5"], ["1.1", "2.5"], ["1.6", "3.5"]]
    assert cells[1][0] == "beta-0.6" and 'href="../beta-0.5/report.html"' in cells[0][0]


def test_a_failed_run_is_named_and_a_damaged_one_too(sweep):
    (sweep / "beta-0.5" / "metrics.json").write_text("{")
    update_reports(sweep)
    text = section(sweep / "beta-0.6")
    assert "beta-0.8 (too few &lt;healthy&gt; heads)" in text
    assert "beta-0.5 (its files cannot be read: " in text
    assert lines_to(text) == ["beta-0.7"] * 2
    assert "Gray lines are the other run;" in text
    (sweep / "logs" / "beta-0.8.failed.json").unlink()
    update_reports(sweep)
    assert "Not finished yet: 1." in section(sweep / "beta-0.6")


def test_only_the_part_of_the_sweep_changes(sweep):
    report = write_report(sweep / "beta-0.5")
    text = report.read_text()
    before = section(report.parent)
    put_lines(sweep / "beta-0.6" / "metrics.jsonl", [{"step": 10, "loss": [9.0]}])
    update_reports(sweep)
    after = section(report.parent)
    assert report.read_text() == text.replace(before, after) and before != after
    assert section_of(RunFiles.read(report.parent)) == f"{BEGIN}{after}{END}"


def test_reports_without_the_part_and_runs_without_a_report_stay_as_they_are(sweep, caplog):
    (sweep / "beta-0.5" / "report.html").write_text("of an older version")
    (sweep / "beta-0.6" / "report.html").unlink()
    with caplog.at_level("INFO"):
        update_reports(sweep)
    assert (sweep / "beta-0.5" / "report.html").read_text() == "of an older version"
    assert not (sweep / "beta-0.6" / "report.html").exists()
    assert f"ssl_kd report {sweep / 'beta-0.5'}" in caplog.text


def test_a_run_of_no_sweep_has_no_such_part(sweep, tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    assert section_of(RunFiles.read(alone)) == ""
    guest = sweep / "guest"  # in the folder of a sweep, but not in its plan
    guest.mkdir()
    assert section_of(RunFiles.read(guest)) == ""
    assert "the sweep -->" not in write_report(guest).read_text()
    (sweep / "sweep.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"sweep\.json cannot be read"):
        write_report(sweep / "beta-0.5")


def test_of_very_many_runs_some_are_drawn(sweep, monkeypatch):
    monkeypatch.setattr(sweep_curves, "MOST", 1)
    update_reports(sweep)
    text = section(sweep / "beta-0.7")
    assert lines_to(text) == ["beta-0.5"] * 2
    assert "Gray lines are 1 of the 2 other finished runs, evenly spread over the sweep" in text


def test_a_distilled_student_shows_its_loss_and_perplexity(tmp_path):
    folder = tmp_path / "rates"
    folder.mkdir()
    put(folder, "sweep.json", {"runs": {"a": {"seed": "0"}, "b": {"seed": "1"}}})
    for name in "ab":
        (folder / name).mkdir()
        put(folder / name, "config.json", {"mode": "language"})
        put(folder / name, "metrics.json", {"steps": 4})
        lines = [
            {"step": 2, "train_loss": 3.0, "ce": 3.0},
            {"step": 2, "eval": {"perplexity": 900}},
        ]
        lines += [{"step": 4, "train_loss": None}, {"step": 4, "eval": {"perplexity": 30.0}}]
        put_lines(folder / name / "metrics.jsonl", lines)
    shown = curves_of(RunFiles.read(folder / "a"))
    assert {title: y.tolist() for title, (_, y) in shown.items()} == {
        TRAIN_LOSS: [3.0, pytest.approx(np.nan, nan_ok=True)],
        PERPLEXITY: [900, 30],
    }
    write_language_report(folder / "a")
    text = section(folder / "a")
    assert lines_to(text) == ["b"] * 2
    assert "compare courses" not in text  # only the seed differs


def test_sweep_of_a_folder_has_the_median_of_finite_losses(sweep):
    read = SweepCurves.read(sweep)
    steps, loss = read.curves["beta-0.6"][LOSS]
    assert steps.tolist() == [10, 20, 30]
    assert loss.tolist() == [2.0, 1.1, pytest.approx(np.nan, nan_ok=True)]
    assert (read.name, list(read.failed), read.n_unfinished) == ("betas", ["beta-0.8"], 0)


def test_events_are_marks_on_the_curve_of_their_part():
    figure = Figure()
    steps, values = np.array([0.0, 100.0]), np.array([[0.0, 10.0, 4.0], [2.0, 10.0, np.nan]])
    axes = axes_over_steps(figure, values)
    at = [(50, "head 0"), (50, "head 1"), (50, "batch"), (50.1, "head 0"), (0, "head 2")]
    at += [(90, "head 2"), (90.1, "head 2")]
    events = [EVENT | {"step": step, "part": part} for step, part in at]
    mark_events(axes, [*events, {"step": None}], steps, values, {f"head {i}": i for i in range(3)})
    (marks,) = axes.lines
    # The median is between 4 and 6; the loss of head 2 has a gap after the first step.
    low = axes.get_ylim()[0]
    places = list(zip(*marks.get_data(), strict=True))
    assert places == [(50, 1), (50, 10), (50, 5), (0, 4), (90, low)] and low < 0
    assert marks.get_label() == "8 events of the guard"
    mark_events(axes, [], steps, values)
    assert len(axes.lines) == 1


def test_the_report_marks_the_events_on_its_curves(sweep):
    path = sweep / "beta-0.6"
    put_lines(path / "events.jsonl", [EVENT])
    text = write_report(path).read_text()
    assert text.count("1 event of the guard") == 3  # of the heads, and two of the sweep
