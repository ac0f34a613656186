"""The report's content, from run folders as a run writes them."""

import csv
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ssl_kd.core.pages import figures
from ssl_kd.vision.data import FolderDataset
from ssl_kd.vision.evaluate import METRICS, Metric, calibration
from ssl_kd.vision.report import run_samples, write_report
from ssl_kd.vision.report.curves import head_curves
from ssl_kd.vision.report.gallery import ShownSamples, thumbnail
from ssl_kd.vision.sources import describe_source, write_sources
from tests.vision.report.reading import (
    Reader,
    change,
    check_that_nothing_is_loaded,
    columns_of_rows,
    put,
    write_and_read,
)

N, N_TEST, K, CLASSES = 60, 20, 4, ("cat", "dog", "frog", "owl")


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished run on 60 labeled training and 20 held-out images, four clusters, six heads."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "run-1"
    folder.mkdir()
    labels = np.arange(N + N_TEST) % K
    clusters = (labels + 1) % K
    clusters[:3] = 0
    scores = {
        "consensus": (0.933, 0.9),
        "best head (unsupervised)": (0.81, 0.8),
        "k-means": (0.782, 0.75),
        "spectral clustering": (0.871, 0.86),
        "best head, chosen by labels": (0.95, 0.9),
    }
    table = [
        {"name": name, "split": split, "acc": acc, "nmi": 0.7, "ari": 0.6, "note": None}
        for name, pair in scores.items()
        for split, acc in zip(("train", "test"), pair, strict=True)
    ]
    heads = [
        {"head": h, "criterion": 2 - h / 10, "loss": -1.5 + h / 8, "collapsed": h == 5,
         "clusters_used": 1 if h == 5 else K, "chosen": h < 2, "acc": 0.9 - h / 20}
        for h in range(6)
    ]  # fmt: skip
    put(folder, "metrics.json", {
        "dataset": {"name": "pets", "n_train": N, "n_test": N_TEST, "n_classes": K,
                    "labelled": True, "class_names": CLASSES, "n_labelled": N,
                    "pictured": True},
        "teacher": {"name": "dinov2_vits14"}, "table": table, "knn_accuracy": 0.961,
        "linear_probe": {"accuracy": 0.974, "C": 0.1}, "heads": heads,
        "cluster_sizes": np.bincount(clusters[:N], minlength=K).tolist(),
        "seconds": {"extract": 3.0, "train": 41.6, "total": 47.2}, "steps": 1000,
        "success_rate": 1.0})  # fmt: skip
    put(folder, "config.json", {
        "settings": {"LEARNING_RATE": 0.004, "SEED": 0}, "versions": {"torch": "2.15.0"},
        "commit": "0123abc", "precision": "cpu: everything in fp32",
        "command": "python train.py --dataset pets"})  # fmt: skip
    lines = [
        {"step": s, "loss": list(-s / 1000 + rng.normal(size=6) / 9)} for s in range(0, 1000, 50)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events.jsonl").write_text("")
    with open(folder / "assignments.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "cluster", "confidence", "split", "label"])
        for i in range(N + N_TEST):
            split = "train" if i < N else "test"
            writer.writerow(
                [f"img{i:02}.jpg", clusters[i], 0.5 + i / 200, split, CLASSES[labels[i]]]
            )
    save_arrays(folder, clusters[:N])
    return folder


def save_arrays(folder: Path, clusters) -> None:
    places = np.random.default_rng(0).normal(size=(N, 2)) + 5 * np.eye(K, 2)[clusters]
    typical = np.stack([np.flatnonzero(clusters == k)[:3] for k in range(K)])
    arrays = {"map": places, "map_cluster": clusters, "typical": typical}
    np.savez(folder / "arrays.npz", **arrays)


def pictures(rows):
    return [Image.new("RGB", (40, 30), (4 * row, 0, 0)) for row in rows]


def read(folder: Path, load: Any = pictures) -> tuple[str, Reader]:
    return write_and_read(folder, samples=None if load is None else ShownSamples("image", load))


def test_the_calibration_of_the_confidence_is_summed_up(run):
    assert "Calibration" not in read(run)[1].text
    measured = calibration([0.95] * 30 + [0.5] * 30, [True] * 27 + [False] * 33)
    change(run, "metrics.json", calibration={"train": measured, "test": None})
    _, page = read(run)
    assert "Calibration error of the confidence (ECE): 27.5 points." in page.text
    assert "Of 30 samples with confidence 0.9 or more, 90.0 % are correct." in page.text


def test_all_numbers_of_the_run_are_there(run):
    _, page = read(run)
    for expected in (
        "93.3 % of 60 images in the right cluster, without a label",
        "The whole run took 47 s.",
        *(
            "consensus",
            "k-means",
            "best head, chosen by labels",
            "training data",
            "held-out data",
            "90.0",
        ),
        *("k-NN, trained with labels", "96.1", "linear probe, trained with labels", "97.4"),
        *("steps1,000", "heads6", "chosen for the answer2", "collapsed1"),
        *("LEARNING_RATE", "0.004", "2.15.0", "0123abc", "cpu: everything in fp32"),
        *("python train.py --dataset pets", "dinov2_vits14", "time of extract3.0 s", "42 s"),
        *("4 clusters of 14 to 18 samples",),
    ):
        assert expected in page.text, expected
    assert "missing" not in re.findall(r'<p class="(\w+)"', (run / "report.html").read_text())


def test_every_row_of_the_scores_has_a_cell_for_each_metric(run, monkeypatch):
    assert set(columns_of_rows(read(run)[0], "results")) == {1 + 2 * len(METRICS)}
    one_more = {**METRICS, "v": Metric("V", "V-measure", lambda labels, clusters: 0.0)}
    monkeypatch.setattr("ssl_kd.vision.report.vision.METRICS", one_more)
    source, page = read(run)
    assert set(columns_of_rows(source, "results")) == {1 + 2 * len(one_more)}
    assert 'title="V-measure">V</th>' in source


def test_page_is_one_file_that_loads_nothing_and_has_two_themes(run):
    source, page = read(run)
    check_that_nothing_is_loaded(source, page)
    assert page.tags.count("svg") == 2
    assert source == read(run)[0]
    assert "currentColor" in source and "var(--line)" in source
    assert not any(stand_in in source for stand_in in figures.PAGE_COLORS)


def test_typical_images_are_requested_by_row(run):
    asked = []

    def images(rows):
        asked.extend(rows)
        return pictures(rows)

    source, page = read(run, images)
    typical = np.load(run / "arrays.npz")["typical"]
    assert asked == typical.ravel().tolist()
    assert source.count("<img") == len(asked)
    assert 'alt="img00.jpg"' in source
    assert "Cluster 2 · dog" in page.text and "100 % of them dog" in page.text


def test_user_text_is_inert(run):
    evil = ("<script>alert(1)</script>", "$x^{$", '"><img src=x onerror=alert(2)>', "日本 & \x00")
    metrics = json.loads((run / "metrics.json").read_text())
    change(run, "metrics.json", dataset=metrics["dataset"] | {"name": evil[0], "class_names": evil})
    change(run, "config.json", command=evil[2], settings={evil[0]: evil[2]}, precision=evil[0])
    put(run, "event", {"step": 3, "part": evil[0], "reason": evil[2], "action": "skipped"})
    (run / "event").rename(run / "events.jsonl")
    rows = (run / "assignments.csv").read_text().replace("cat", evil[0]).replace("dog", evil[1])
    (run / "assignments.csv").write_text(rows.replace("img", "<script>"))
    source, page = read(run)
    assert "script" not in page.tags and "onerror" not in re.sub(r"&#?\w+;", "", "".join(page.tags))
    assert (
        "<script" not in source and "<img src=x" not in source and 'onerror=alert(2)"' not in source
    )
    assert evil[0] in page.text and "$x^{$" in page.text


def test_guard_events_are_drawn_and_listed(run):
    page = read(run)[1]
    assert "No events: every loss" in page.text
    events = [
        {"step": 120, "part": "head 3", "stage": "gradient", "reason": "not finite",
         "action": "skipped", "value": None},
        {"step": 140, "part": "head 3", "stage": "weight", "reason": "not finite",
         "action": "restored", "value": 1e30},
    ]  # fmt: skip
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    page = read(run)[1]
    assert "2 events on 1 part: 1 skipped, 1 restored." in page.text
    assert "No events" not in page.text and "1e+30" in page.text
    lines = [json.dumps(events[0] | {"step": step}) for step in range(9000)]
    (run / "events.jsonl").write_text("\n".join(lines))
    source, page = read(run)
    assert "9,000 events on 1 part" in page.text and "first 200 of 9000" in page.text
    assert len(source) < 500_000


def test_collapse_and_empty_clusters_are_flagged(run):
    change(run, "metrics.json", cluster_sizes=[58, 2, 0, 0])
    _, page = read(run)
    assert "Collapse: the effective number of clusters is 1.2 of 4" in page.text
    assert "2 of 4 clusters are empty: 2, 3." in page.text


def test_run_without_labels(run):
    metrics = json.loads((run / "metrics.json").read_text())
    data = metrics["dataset"] | {"labelled": False, "name": "/home/me/holiday"}
    heads = [head | {"acc": None} for head in metrics["heads"]]
    change(run, "metrics.json", dataset=data, table=[], knn_accuracy=None, linear_probe=None,
           heads=heads)  # fmt: skip
    _, page = read(run)
    assert "60 images sorted into 4 clusters, without a label" in page.text
    assert "The data has no labels" in page.text
    assert "chosen by labels" not in page.text


def test_features_have_no_pictures(run):
    _, page = read(run, None)
    assert "60 samples in the right cluster" in page.text.replace("93.3 % of ", "")
    assert "this data has features, not images" in page.text


def test_lost_images_cost_only_the_pictures(run):
    def gone(rows):
        raise FileNotFoundError("img03.jpg was moved")

    _, page = read(run, gone)
    assert "There are no pictures: FileNotFoundError: img03.jpg was moved" in page.text
    assert "93.3 % of 60 images" in page.text


def test_a_report_after_the_run_finds_its_pictures_again(run, tmp_path):
    folder = tmp_path / "my images"
    folder.mkdir()
    for i in range(N + 1):  # one of them was unreadable, and has no row
        name = "a broken one.jpg" if i == N else f"img{i:02}.jpg"
        Image.new("RGB", (8, 8), (4 * (i % 64), 9, 9)).save(folder / name)
    settings = {"DATASET": str(folder), "DATASET_TEST": None, "DATA_DIR": "data", "COLUMN": None}
    change(run, "config.json", settings=settings, learns_from="")
    dataset = FolderDataset(folder, "my images", "train")
    rows: Any = SimpleNamespace(indices=torch.arange(1, N + 1))
    write_sources(run, {"train": describe_source(dataset, rows)})
    images = run_samples(run)
    assert images is not None
    red = [np.asarray(image)[0, 0, 0] for image in images.load([0, 41, 7])]
    assert red == pytest.approx([0, 164, 28], abs=8)
    _, page = read(run, images.load)
    assert page.tags.count("img") > K and "no pictures" not in page.text

    (folder / "img04.jpg").unlink()
    _, page = read(run, images.load)
    assert "no pictures: FileNotFoundError: the sample img04.jpg is no longer in" in page.text
    shutil.rmtree(folder)
    _, page = read(run, images.load)
    assert "There are no pictures: " in page.text and "my images" in page.text
    change(run, "metrics.json", dataset={"pictured": False})
    assert run_samples(run) is None


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python train.py --run_name 'a b' --resume --seed 3", "python train.py --seed 3"),
        ("ssl_kd train --run-name=a --seed 3", "ssl_kd train --seed 3"),
        ("train.py --run_name", "train.py"),
    ],
)
def test_the_command_that_is_shown_starts_another_run(run, command, shown):
    change(run, "config.json", command=command)
    source, page = read(run)
    assert shown in page.text and "--resume" not in page.text and "--run" not in page.text


def test_the_interval_of_k_is_below_the_headline(run):
    change(run, "metrics.json", graph={"number": {
        "n_clusters": 4, "interval": [2, 5], "ranked": [{"n_clusters": 4}]}})  # fmt: skip
    page = write_report(run).read_text()
    assert "Likely 2 to 5 clusters; 4 are used." in page


def test_empty_folder_gives_a_page_that_says_what_is_missing(tmp_path):
    _, page = read(tmp_path, None)
    for what in (
        *("no table of scores", "no map", "no pictures"),
        *("no cluster sizes", "no loss curves", "no table of heads", "no settings"),
    ):
        assert what in page.text, what


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_report(tmp_path / "nowhere")


def test_killed_run_with_a_torn_last_line_and_faulty_losses(run):
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 1000, "loss": [null, NaN, Infinity, 1.0, 2.0, 1e30]}\n{"step": 10')
    page = read(run)[1]
    assert "no loss curves" not in page.text and page.tags.count("svg") == 2


def test_many_clusters_and_photographs_stay_under_five_megabytes(run):
    k, n = 300, 3000
    rng = np.random.default_rng(0)
    clusters = np.arange(n) % k
    photo = Image.fromarray(rng.integers(0, 255, (80, 120, 3), dtype=np.uint8)).resize((480, 320))
    np.savez(run / "arrays.npz", map=rng.normal(size=(n, 2)), map_cluster=clusters,
             typical=np.argsort(clusters, kind="stable").reshape(k, -1))  # fmt: skip
    change(run, "metrics.json", cluster_sizes=[10] * k)
    source, page = read(run, lambda rows: [photo] * len(rows))
    assert "the 100 largest of 300 clusters" in page.text
    assert len(source) < 5_000_000


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16", "F"])
def test_any_picture_mode_becomes_a_thumbnail(mode):
    picture = thumbnail(Image.new(mode, (50, 9)))
    assert picture["kind"] == "photo" and picture["source"].startswith("data:image/jpeg;base64,")


def test_global_matplotlib_state_is_left_alone(run):
    import sys

    import matplotlib

    before = dict(matplotlib.rcParams)
    pyplot = "matplotlib.pyplot" in sys.modules
    read(run)
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == pyplot


def test_the_cross_entropy_to_given_clusters_is_dotted():
    steps: list[dict[str, Any]] = [{"step": i, "loss": [0.1 * i, 0.2]} for i in range(1, 5)]
    solid = str(head_curves(steps, [0])).count("stroke-dasharray")
    for line in steps[:2]:
        line["by_loss"] = [False, True]
    assert str(head_curves(steps, [0])).count("stroke-dasharray") > solid
