import json

import numpy as np

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


def test_several_values_are_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", "--dataset", "digits", "--image_size", "8,16"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [line for line in lines if line[:1] == ["pixels"]]
    assert [row[1] for row in rows] == ["8", "16"]
    assert [row[2] for row in rows] == ["64", "256"]


def test_without_labels_the_rank_remains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32))
    assert main(["evaluate", "--dataset", "x.npy"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[-2:][0] == "-"


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
    assert len(row.split()) == 14
