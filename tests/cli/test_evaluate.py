import json

import numpy as np
from PIL import Image

from ssl_kd.cli import main


def features(folder, name, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.arange(120) % 3
    path = folder / name
    x = rng.normal(size=(120, 6)) + 5 * np.eye(6)[labels]
    np.savez(path, features=x.astype(np.float32), labels=labels)
    return str(path)


def test_scores_are_printed_and_written_with_what_repeats_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--dataset", features(tmp_path, "a.npz"), "--out", "scores.json"]
    assert main(["evaluate", *words]) == 0
    assert "10-shot, %" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "scores.json").read_text())
    assert row["knn_accuracy"] > 0.9
    assert row["linear_probe"]["accuracy"] > 0.9
    assert [probe["shots"] for probe in row["few_shot"]] == [1, 5, 10]
    assert 1 < row["rankme"] < 6
    assert {"settings", "versions", "commit", "precision", "cache"} <= set(row)
    assert not (tmp_path / "runs").exists()


def test_a_rare_class_is_named_below_the_table_and_in_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arrays = dict(np.load(features(tmp_path, "a.npz")))
    rare = np.flatnonzero(arrays["labels"] == 2)[4:]
    np.savez("b.npz", **{name: np.delete(array, rare, 0) for name, array in arrays.items()})
    assert main(["evaluate", "--dataset", "b.npz", "--out", "scores.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    note = "1 of 3 classes have fewer than {} labeled samples and are left out: 2"
    assert lines[-3:] == [
        f"5-shot: {note.format(6)}",
        f"10-shot: {note.format(11)}",
        "Scores: scores.json",
    ]
    (row,) = json.loads((tmp_path / "scores.json").read_text())
    assert [probe["left_out"] for probe in row["few_shot"]] == [[], ["2"], ["2"]]
    assert min(probe["accuracy"] for probe in row["few_shot"]) > 0.9


def test_several_values_are_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "--dataset", "digits", "--image_size", "8,16"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if line[:1] == ["pixels"]]
    assert [row[1] for row in rows] == ["8", "16"]
    assert [row[2] for row in rows] == ["64", "256"]
    assert lines[0][-2:] == ["agreement,", "%"] and 0 < float(rows[0][-1]) < 100
    assert rows[0][-1] == rows[1][-1]


def test_teachers_are_not_ranked_without_labels(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for i in range(30):
        pixels = np.random.default_rng(i).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"photos/{i}.png")
    words = ["--teacher", "pixels", "--dataset", "photos", "--image_size"]
    assert main(["evaluate", *words, "4,8"]) == 0
    assert "Which teacher is best cannot be told without labels" in capsys.readouterr().out
    assert main(["evaluate", *words, "4"]) == 0
    assert "cannot be told" not in capsys.readouterr().out


def test_without_labels_the_columns_that_need_none_remain(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32))
    assert main(["evaluate", "--dataset", "x.npy"]) == 0
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["teacher", "width", "RankMe", "alpha-ReQ", "LiDAR"]
    assert row.split()[1] == "4" and row.split()[-3:] == ["-", "one", "view"]


def test_caches_are_scored_without_data_as_with_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--dataset", features(tmp_path, "a.npz"), "--embeddings_dir", "cache"]
    assert main(["evaluate", *flags, "--out", "data.json"]) == 0
    (tmp_path / "a.npz").unlink()
    assert main(["evaluate", "cache", "cache", "--out", "caches.json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 9
    (by_data,) = json.loads((tmp_path / "data.json").read_text())
    first, second = json.loads((tmp_path / "caches.json").read_text())
    scores = ("knn_accuracy", "linear_probe", "few_shot", "rankme", "alpha_req", "lidar", "rows")
    assert {k: first[k] for k in scores} == {k: by_data[k] for k in scores}
    assert by_data["agreement"] is None and first["agreement"] == second["agreement"] > 0.1
    assert first["rankme"] == second["rankme"] and first["fingerprint"]["teacher"] == "features"


def test_caches_of_other_samples_or_with_flags_for_data_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, n in (("a", 30), ("b", 31)):
        np.save(f"{name}.npy", np.random.default_rng(0).normal(size=(n, 4)).astype(np.float32))
        assert main(["evaluate", "--dataset", f"{name}.npy", "--embeddings_dir", name]) == 0
    for words, message in (
        (["a", "b"], "b and a hold different samples (31 and 30)"),
        (["a", "c"], "c holds no embeddings_train.json; expected a cache"),
        (["a", "--teacher", "pixels"], "--teacher has no effect on caches"),
        (["a", "--views", "4"], "--views is 4, but a cache holds no images"),
        (["--dataset", "a.npy", "--views", "4"], "DATASET a.npy holds no images"),
        (["a", "--probe_steps", "4"], "--probe_steps has no effect without --probe sgd"),
    ):
        assert main(["evaluate", *words]) == 2
        assert message in capsys.readouterr().err


def test_views_and_the_probe_of_dinov2_are_scored_and_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--dataset", "digits", "--views", "3", "--probe", "sgd", "--probe_steps", "200"]
    assert main(["evaluate", *words, "--out", "scores.json"]) == 0
    (row,) = json.loads((tmp_path / "scores.json").read_text())
    protocol = {"seed": row["settings"]["SEED"], "probe": "sgd", "views": [200, 3]}
    assert protocol.items() <= row["protocol"].items()
    assert row["protocol"]["knn"] == {"k": 20, "temperature": 0.07}
    assert 1 < row["lidar"]["value"] < 64 and row["lidar"]["note"] is None
    assert row["linear_probe"]["accuracy"] > 0.85 and len(row["linear_probe"]["rates"]) == 13
    assert {"steps": 200, "batch_size": 128}.items() <= row["linear_probe"].items()


def test_bad_words_are_refused_before_anything_is_embedded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "--dataset", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    for words in (["--extend", "x"], ["--run_name", "x"], ["--resume"], ["--runs_dir", "a,b"]):
        assert main(["evaluate", *words]) == 2
        assert "has no effect, because ssl_kd evaluate starts no run" in capsys.readouterr().err
    (tmp_path / "config.py").write_text("EXTEND = 'x'\n")
    assert main(["evaluate"]) == 2
    assert "EXTEND is 'x', and has no effect" in capsys.readouterr().err
    (tmp_path / "config.py").unlink()
    assert not list(tmp_path.iterdir())


def test_a_folder_as_the_file_of_the_scores_is_refused_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "--out", "."]) == 2
    assert "OUT is '.', which is a folder; expected a file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_row_is_one_line_in_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "--dataset", features(tmp_path, "a.npz")]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "features" in line)
    assert row.count("±") == 3
    assert len(row.split()) == 17
