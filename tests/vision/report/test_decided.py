"""The report after decisions, and the command that writes it."""

import hashlib
import json
import shutil

import numpy as np
import pytest

from ssl_kd.cli import main
from ssl_kd.core.pages.curves import MAX_POINTS, interval_means
from ssl_kd.vision.report import Decided, run_samples, write_report
from ssl_kd.vision.report.curves import curve_text
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions import Curation
from tests.vision.report.reading import Reader, change


@pytest.fixture
def run(photo_run, tmp_path):
    return shutil.copytree(photo_run, tmp_path / "copy")


def digests(run):
    files = (file for file in sorted(run.rglob("*")) if file.is_file())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def section(page, name):
    return page.partition(f'<section id="{name}">')[2].partition("</section>")[0]


def test_the_command_writes_names_and_decisions_and_changes_nothing_else(run, capsys):
    curation = Curation.open(run, by="anna")
    k, other = sorted(curation.sizes)[:2]
    curation.rename(k, "<ovals>")
    curation.merge([k, other])
    curation.exclude([5, 6])
    curation.undo(curation.split(k)["id"])
    before = digests(run)
    assert main(["report", str(run)]) == 0
    assert f"Report: {run / 'report.html'}" in capsys.readouterr().out
    after = digests(run)
    assert [name for name in after if after[name] != before.get(name)] == ["report.html"]
    page = (run / "report.html").read_text(encoding="utf-8")
    text = Reader(page).text
    after_decisions = Curation.open(run)
    train = after_decisions.clusters[: len(Samples(run).splits["train"])]
    n_clusters = len(set(train[train >= 0].tolist()))
    assert f"After 3 decisions: {n_clusters} clusters, 2 samples excluded." in text
    assert f"<ovals> (cluster {k})" in text and "<ovals> (" not in page
    assert f"{(train == k).sum()} images" in section(page, "clusters")
    assert f"Cluster {other} " not in text
    decisions = section(page, "decisions")
    assert decisions.count("anna") == 4 and decisions.count('class="undone"') == 1
    assert decisions.index("2 samples excluded") < decisions.index(f"clusters {k}, {other} merged")
    assert "Scores are those of the run, before the decisions below." in text
    assert f"Each of the {(train >= 0).sum()} dots" in text


def test_the_map_and_the_typical_samples_are_those_after_the_decisions():
    clusters = np.array([0, 0, 1000, -1, 1000, 2])
    decided = Decided(clusters, {1000: "new"}, [])
    assert decided.sizes == {0: 2, 2: 1, 1000: 2} and decided.summary == ""
    confidence = np.array([0.2, 0.9, 0.1, 1.0, 0.8, 0.5])
    assert decided.typical(confidence) == {0: [1, 0], 2: [5], 1000: [4, 2]}
    assert decided.on_map(np.array([1, 3]), np.array([0, 1])).tolist() == [0, -1]
    assert decided.on_map(None, np.arange(6)) is clusters
    shown = np.array([7, 8])  # an older run does not say which samples are on its map
    assert decided.on_map(None, shown) is shown


def test_without_decisions_the_report_is_that_of_the_run(run):
    write_report(run, samples=run_samples(run))
    before = (run / "report.html").read_text()
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_text() == before and 'id="decisions"' not in before


def test_folders_without_a_run_are_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nothing")]) == 2
    assert str(tmp_path / "nothing") in capsys.readouterr().err


def test_clusters_without_samples_are_counted_apart_and_get_no_box(run):
    metrics = json.loads((run / "metrics.json").read_text())
    sizes = [*metrics["cluster_sizes"], 0, 0]
    data = metrics["dataset"] | {"labelled": False, "n_labelled": 0}
    change(run, "metrics.json", cluster_sizes=sizes, table=[], dataset=data)
    with np.load(run / "arrays.npz") as file:
        arrays = dict(file)
    rows = np.pad(arrays["typical"], ((0, 2), (0, 0)), constant_values=-1)
    np.savez(run / "arrays.npz", **(arrays | {"typical": rows}))
    page = write_report(run, samples=run_samples(run)).read_text()
    empty = [str(k) for k, size in enumerate(sizes) if not size]
    n = len(sizes) - len(empty)
    assert f"images sorted into {n} clusters" in page
    assert f"{len(empty)} of {len(sizes)} clusters are empty: {', '.join(empty)}." in page
    assert section(page, "clusters").count('class="card cluster"') == n
    assert 'id="results"' not in page  # without labels there is nothing to show


def test_no_box_is_empty(run):
    (run / "metrics.jsonl").write_text("")
    page = write_report(run).read_text()
    boxes = page.split('class="card')[1:]
    assert len(boxes) > 3
    assert all("missing" not in box.partition("</div>")[0] for box in boxes)
    assert "There are no loss curves" in page


def test_changed_settings_come_first(run):
    write_report(run)
    page = section((run / "report.html").read_text(), "settings")
    first, folded = page.split("<details")
    assert "HIDDEN_DIM" in first and "HIDDEN_DIM" not in folded
    assert "TEACHER_TEMP" in folded and "TEACHER_TEMP" not in first
    assert "<dt>torch</dt>" in folded


def test_a_curve_shows_means_of_intervals_of_steps():
    steps = np.arange(1, 1001)
    values = np.stack([np.sin(steps), np.full(1000, 2.0)], 1)
    values[::2, 1] = np.nan
    values[:17, 1] = np.inf
    x, means = interval_means(steps, values)
    size = -(-1000 // MAX_POINTS)
    assert len(x) <= MAX_POINTS and x[0] == size and x[-1] == 1000
    assert means[3, 0] == pytest.approx(values[3 * size : 4 * size, 0].mean())
    assert np.isnan(means[0, 1]) and (means[1:, 1] == 2).all()
    lines = [{"step": int(step), "loss": [0.5]} for step in steps]
    assert curve_text(lines) == f"Each point is the mean of {size} logged steps."
    assert curve_text(lines[:40]) == ""
