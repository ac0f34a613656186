"""`ssl_kd curate`: tables of a run and of a cache, and invalid arguments."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pytest
from PIL import Image
from pyarrow import csv, parquet

from ssl_kd.cli import main
from ssl_kd.core.files.cells import from_cell
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.curate import outliers
from ssl_kd_explore.decisions import Curation
from tests.explore.curate.stores import distinct, write
from tests.faults.matrix import row as fault


def error_of(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_a_run_and_its_copies_are_excluded_on_request(photo_run, tmp_path, capsys):
    run, out = shutil.copytree(photo_run, tmp_path / "copy"), tmp_path / "out"
    words = ["curate", str(run), "--out", str(out), "--exclude", "--force"]
    words += ["--rule", "largest", "--duplicates", "0.97"]
    assert main(words) == 0
    samples, shown = Samples(run), capsys.readouterr().out
    names = {"duplicates", "outliers", "images", "leaks", "labels", "kept"}
    assert all(name in shown for name in names)
    assert {path.stem for path in out.iterdir()} == names
    outlier = csv.read_csv(out / "outliers.csv").to_pydict()
    assert outlier["score"][0] == 1 and outlier["row"] == outliers(samples.store()).rows.tolist()
    assert outlier["file"][0] == samples.column("file")[outlier["row"][0]]
    n = len(samples.splits["train"])
    assert csv.read_csv(out / "labels.csv").num_rows == n
    n_copies = csv.read_csv(out / "duplicates.csv")["kept"].to_pylist().count(False)
    assert len((out / "kept.txt").read_text().splitlines()) == n - n_copies < n
    assert Curation.open(run).excluded.sum() == n_copies
    assert main(words) == 0  # excludes no sample twice
    assert len(Curation.open(run).lines) == 1
    assert main(["export", str(run), "--to", "parquet", "--out", str(tmp_path / "x.parquet")]) == 0
    assert parquet.read_table(tmp_path / "x.parquet").num_rows == len(samples) - n_copies


def test_tables_in_a_cache_are_replaced_only_with_force(tmp_path, capsys):
    x, _ = distinct(200)
    cache = write(tmp_path / "cache", np.concatenate([x, x[:4]])).folder
    assert main(["curate", str(cache)]) == 0
    found = csv.read_csv(cache / "curated" / "duplicates.csv")
    assert found.num_rows == 8 and "leaks" not in capsys.readouterr().out
    assert len((cache / "curated" / "kept.txt").read_text().splitlines()) == 200
    (cache / "curated" / "kept.txt").write_text("edited")
    assert main(["curate", str(cache)]) == 2
    assert "curated is not empty: give another folder with --out" in error_of(capsys)
    assert (cache / "curated" / "kept.txt").read_text() == "edited"
    assert main(["curate", str(cache), "--duplicates", "0.3", "--force"]) == 0
    assert csv.read_csv(cache / "curated" / "duplicates.csv").num_rows > 8
    assert len((cache / "curated" / "kept.txt").read_text().splitlines()) < 200


def test_wrong_labels_are_listed_by_class_name(tmp_path):
    x, labels = distinct(50)
    labels[:2] = -1
    cache = write(tmp_path / "cache", x, labels=labels, class_names=list("abcdefgh")).folder
    assert main(["curate", str(cache)]) == 0
    table = csv.read_csv(cache / "curated" / "labels.csv")
    assert {*table["label"].to_pylist(), *table["suggested"].to_pylist()} <= {*"abcdefgh"}


@fault(172)
@pytest.mark.parametrize(
    "odd", ["x\ny.png", "x\r\ny", "\u2028", '"x"', "=cmd|' /C calc'!A0", "\tx"]
)
def test_no_name_forges_a_line_of_kept_or_a_formula_of_a_table(tmp_path, odd):
    names = [odd, *(f"{i}.png" for i in range(49))]
    cache = write(tmp_path / "cache", distinct(50)[0], ids=names).folder
    assert main(["curate", str(cache)]) == 0
    lines = (cache / "curated" / "kept.txt").read_text().splitlines()
    assert len(lines) == 50 and lines[1:] == names[1:]
    assert (json.loads(lines[0]) if lines[0] != odd else lines[0]) == odd
    parsed = csv.ParseOptions(newlines_in_values=True)
    table = csv.read_csv(cache / "curated" / "outliers.csv", None, parsed)
    cell = table["file"][table["row"].to_pylist().index(0)].as_py()
    assert from_cell(cell) == odd and cell[0] not in "=+-@\t\r\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rule", "first"], "arguments are required: FOLDER"),
        (["nowhere"], "nowhere is not a folder"),
        (["{}", "--rule", "best"], "argument --rule: invalid choice: 'best'"),
        (["{}", "--duplicates", "near"], "expected auto or a cosine from -1 to 1, got near"),
        (["{}", "--duplicates", "7"], "expected auto or a cosine from -1 to 1, got 7"),
        (["{}", "--label", "9"], "There is no flag --label. ssl_kd curate --help lists"),
        (["{}", "--out", "a\0b"], "contains a NUL character"),
        (["{}", "--images"], "--images needs a run folder, but"),
        (["{}", "--exclude"], "--exclude needs a run folder, but"),
        (["{}", "--split", "val"], "nor a cache of the split val (no embeddings_val.json)"),
    ],
)
def test_invalid_arguments_are_one_line_and_write_nothing(tmp_path, capsys, words, message):
    cache = write(tmp_path / "cache", distinct(50)[0]).folder
    assert main(["curate", *(word.format(cache) for word in words)]) == 2
    assert message in error_of(capsys)
    assert not (cache / "curated").exists()


@fault(130)
def test_a_run_with_embeddings_of_other_samples(photo_run, tmp_path, capsys):
    copy = shutil.copytree(photo_run, tmp_path / "copy")
    text = (copy / "config.json").read_text()
    folder = Samples(photo_run).settings["EMBEDDINGS_DIR"]
    (copy / "config.json").write_text(text.replace(folder, str(tmp_path / "other")))
    write(Path(tmp_path / "other"), distinct(50)[0])
    assert main(["curate", str(copy)]) == 2
    assert "holds 50 embeddings, but not those of" in error_of(capsys)


def test_only_damaged_pictures_of_a_table_are_excluded(tmp_path, monkeypatch):
    """The pictures are embedded in modes that are converted before they are shown."""
    modes = ["RGBA", "P", "1", "CMYK", "LA"] * 12
    drawn = np.random.default_rng(0).integers(0, 255, (60, 8, 8), np.uint8)
    pictures = []
    for pixels, mode in zip(drawn, modes, strict=True):
        file = io.BytesIO()
        image = Image.fromarray(pixels).convert("RGB")
        image.convert(mode).save(file, "TIFF" if mode == "CMYK" else "PNG")
        pictures.append({"bytes": file.getvalue(), "path": None})
    pictures[3]["bytes"] = pictures[3]["bytes"][:40]  # damaged
    pictures[4]["bytes"] = b"\0\0\0\x18ftypheic"  # intact, but it needs a package
    features = drawn.reshape(60, -1).astype(np.float32)
    table = arrow.table({"image": pictures, "features": list(features)})
    parquet.write_table(table, tmp_path / "t.parquet")
    monkeypatch.chdir(tmp_path)
    words = ["--n_clusters=3", "--n_heads=4", "--max_steps=20", "--baselines=false", "--run_name=a"]
    assert main(["train", "--dataset", "t.parquet", *words]) == 0
    assert main(["curate", "runs/a", "--images", "--exclude", "--duplicates", "1"]) == 0
    reasons = csv.read_csv("runs/a/curated/images.csv").to_pydict()
    assert reasons["row"] == [3, 4] and reasons["reason"][0].startswith("unreadable: ")
    assert reasons["reason"][1].startswith("not checked: ")
    assert np.flatnonzero(Curation.open(tmp_path / "runs" / "a").excluded).tolist() == [3]
