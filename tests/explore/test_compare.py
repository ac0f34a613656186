"""Two runs side by side: `ssl_kd compare` and `Run.compare`."""

import json
import shutil

import numpy as np
import pyarrow as arrow
import pyarrow.csv
import pytest

from ssl_kd import Run
from ssl_kd.cli import main
from ssl_kd.core.errors import InputError
from ssl_kd.core.runs.folder import RunFolderError
from ssl_kd.vision.assignments import assignments_of
from ssl_kd.vision.evaluate import METRICS
from ssl_kd.vision.sources import SOURCES
from ssl_kd_explore.compare import judge, summary
from tests.vision.report.reading import Reader, check_that_nothing_is_loaded, columns_of_rows


@pytest.fixture
def copy(photo_run, tmp_path):
    """A run that a test may decide about, or edit."""
    return shutil.copytree(photo_run, tmp_path / "copy")


def edit_files(folder, change) -> None:
    """Replace the file names of a run, `[n]` strings."""
    path = assignments_of(folder)
    table = pyarrow.csv.read_csv(path)
    names = arrow.array(change(np.array(table["file"].to_pylist(), object)).tolist())
    pyarrow.csv.write_csv(table.set_column(table.column_names.index("file"), "file", names), path)


def test_a_run_agrees_with_itself(photo_run):
    result = Run.open(photo_run).compare(Run.open(photo_run))
    assert result["agreement"] == {"matched": 1.0, "ami": 1.0, "ari": 1.0}
    assert result["differences"] == result["splits"] == result["merges"] == []
    value_a, value_b, *_ = result["judgement"]["evidence"].values()
    assert value_a == value_b
    assert result["labels"]["a"] == result["labels"]["b"]


def test_a_merged_cluster_is_named(photo_run, copy):
    run, other = Run.open(photo_run), Run.open(copy)
    other.curation.merge([1, 2], "both")
    sizes, clusters = run.curation.sizes, run.curation.clusters
    result = run.compare(other)
    (merge,), (difference,) = result["merges"], result["differences"]
    assert result["splits"] == [] and merge["cluster"] == 1
    large, small = sorted((1, 2), key=lambda cluster: -sizes[cluster])
    assert merge["parts"] == [{"cluster": k, "samples": sizes[k]} for k in (large, small)]
    assert (difference["a"], difference["b"], difference["samples"]) == (small, 1, sizes[small])
    confidence = run.samples.column("confidence")
    typical = {k: np.flatnonzero(clusters == k) for k in (large, small)}
    typical = {k: rows[np.argsort(-confidence[rows], kind="stable")] for k, rows in typical.items()}
    assert difference["rows"] == difference["typical_a"] == typical[small][:8].tolist()
    assert difference["typical_b"] == typical[large][:8].tolist()  # in B and agreed on
    assert difference["files"] == run.samples.column("file")[difference["rows"]].tolist()
    text = "\n".join(summary(result))
    assert f"1 both of B ({sizes[1] + sizes[2]}) is" in text and "By the" in text


def test_the_command_writes_a_page_and_its_numbers(photo_run, copy, capsys):
    Run.open(copy).curation.merge([1, 2], "<b>both</b>")
    assert main(["compare", str(copy), str(photo_run)]) == 0
    page = copy / f"compare-{photo_run.name}.html"
    assert "A and B agree on" in (printed := capsys.readouterr().out) and str(page) in printed
    source = page.read_text()
    reader = Reader(source)
    check_that_nothing_is_loaded(source, reader)
    assert columns_of_rows(source, "labels") == 3 * [1 + len(METRICS)]  # header, A, B
    assert reader.tags.count("img") == 24 and "1 <b>both</b>" in reader.text
    assert json.loads(page.with_suffix(".json").read_text())["agreement"]["matched"] < 1
    assert main(["compare", str(copy), str(photo_run), "--out", str(page)]) == 2
    assert "exists: choose another path" in capsys.readouterr().err
    assert main(["compare", str(copy), str(photo_run), "--out", "numbers.json"]) == 2
    assert "expected a name that ends in .html" in capsys.readouterr().err


def test_samples_that_only_one_run_has(photo_run, copy):
    rng = np.random.default_rng(0)
    edit_files(copy, lambda names: np.where(np.arange(len(names)) == 1, names[0], names))
    result = Run.open(photo_run).compare(Run.open(copy))
    assert result["samples"] == result["a"]["samples"] - 2  # both samples of the repeated name
    edit_files(copy, lambda names: np.where(np.arange(len(names)) == 1, "restored", names))
    edit_files(copy, lambda names: np.where(np.arange(len(names)) < 5, "new " + names, names))
    result = Run.open(photo_run).compare(Run.open(copy))
    n = result["a"]["samples"]
    assert result["samples"] == n - 5 and result["agreement"]["ari"] == 1
    assert result["a"]["missing_in_other"] == result["b"]["missing_in_other"] == 5
    edit_files(copy, rng.permutation)  # other pictures have these names now, and are left out
    assert Run.open(photo_run).compare(Run.open(copy))["samples"] < n / 2
    (copy / SOURCES).unlink()  # as in older runs, which do not know their pictures
    assert Run.open(photo_run).compare(Run.open(copy))["agreement"]["ari"] < 0.1
    edit_files(copy, lambda names: "other/" + names)
    with pytest.raises(InputError, match="have no sample in common: their first files are"):
        Run.open(photo_run).compare(Run.open(copy))


def test_excluded_samples_do_not_count(photo_run, copy):
    other = Run.open(copy)
    other.curation.exclude([0, 1])
    result = other.compare(Run.open(photo_run))
    assert result["without_cluster"] == 2 and result["agreement"]["matched"] == 1


def test_a_language_run_is_refused(photo_run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"mode": "language"}))
    with pytest.raises(RunFolderError, match="language"):
        Run.open(photo_run).compare(Run.open(tmp_path))


def test_pictures_and_embeddings_that_are_gone(photo_run, copy, tmp_path, caplog):
    other = Run.open(copy)
    other.curation.merge([0, 1])
    settings = other.samples.settings
    for name in ("DATASET", "EMBEDDINGS_DIR"):
        shutil.move(settings[name], tmp_path / name)
    try:
        assert main(["compare", str(copy), str(photo_run), "--out", str(tmp_path / "a.html")]) == 0
    finally:
        for name in ("DATASET", "EMBEDDINGS_DIR"):
            shutil.move(tmp_path / name, settings[name])
    text = Reader((tmp_path / "a.html").read_text()).text
    assert "There are no pictures" in text and "the embeddings of" in text
    assert "cannot be told" in text and ".png" in text


def blobs(noise: float, n_columns: int = 8) -> np.ndarray:
    """Return 300 samples around five centers; the noise differs with its amount."""
    centers = 3 * np.random.default_rng(0).normal(size=(5, n_columns))
    rng = np.random.default_rng(int(10 * noise))
    return centers[np.arange(300) % 5] + noise * rng.normal(size=(300, n_columns))


def values_of(judgement) -> list[float]:
    a, b, *_ = judgement["evidence"].values()
    return [a, b]


def test_the_clustering_that_common_neighbors_share_has_the_higher_value():
    true = np.arange(300) % 5
    wrong = np.where(np.random.default_rng(1).random(300) < 0.3, (true + 1) % 5, true)
    result = judge(blobs(1), blobs(2), true, wrong)
    of_true, of_wrong = values_of(result)
    assert of_true > of_wrong
    assert values_of(judge(blobs(2), blobs(1), wrong, true)) == [of_wrong, of_true]
    assert values_of(judge(blobs(1), blobs(2), true, (true + 2) % 5)) == [of_true, of_true]
    assert result["verdict"] == "Which is better cannot be told without labels."


def test_without_common_neighbors_there_is_no_value():
    result = judge(np.ones((1, 2)), np.ones((1, 2)), np.zeros(1, int), np.zeros(1, int))
    assert result["evidence"] == {}
    assert "told without labels: no pair of samples are neighbors in both" in result["verdict"]


def test_the_evidence_counts_the_common_neighbors():
    rng = np.random.default_rng(2)
    n = 600
    shape, color = rng.integers(6, size=n), rng.integers(6, size=n)
    of_shape, of_color = (4 * np.eye(6)[k] + rng.normal(size=(n, 6)) for k in (shape, color))
    evidence = judge(of_shape, of_color, shape, color)["evidence"]
    assert evidence["samples"] == n
    assert 0 < evidence["samples with such a neighbor, %"] < 33
    same = judge(of_shape, of_shape, shape, color)["evidence"]
    assert same["samples with such a neighbor, %"] > 95
    assert same["neighbors that both runs share, per sample"] > 5


def test_the_page_and_the_command_say_that_it_cannot_be_told(photo_run, copy, capsys):
    Run.open(copy).curation.merge([1, 2], "both")
    assert main(["compare", str(copy), str(photo_run)]) == 0
    page = copy / f"compare-{photo_run.name}.html"
    judgement = json.loads(page.with_suffix(".json").read_text())["judgement"]
    text = Reader(page.read_text()).text
    assert judgement["verdict"] == "Which is better cannot be told without labels."
    assert judgement["verdict"] in capsys.readouterr().out and judgement["verdict"] in text
    assert all(name in text for name in judgement["evidence"])
