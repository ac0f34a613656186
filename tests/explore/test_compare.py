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
    assert result["judgement"]["better"] is None
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


def test_the_clustering_that_common_neighbors_share_is_better():
    true = np.arange(300) % 5
    wrong = np.where(np.random.default_rng(1).random(300) < 0.3, (true + 1) % 5, true)
    for a, b, better in ((true, wrong, "a"), (wrong, true, "b"), (true, (true + 2) % 5, None)):
        result = judge(blobs(1), blobs(2), a, b)
        assert result["better"] == better, result
    assert result["probability"] == 0.5
    other_way = judge(blobs(2), blobs(1), wrong, true)["probability"]
    assert judge(blobs(1), blobs(2), true, wrong)["probability"] == pytest.approx(1 - other_way)
    assert 0.85 < 1 - other_way < 0.93


def test_no_verdict_without_common_neighbors():
    one = np.ones((1, 2)), np.zeros(1, int)
    alone = judge(one[0], one[0], one[1], one[1])
    assert alone["better"] is None and alone["probability"] is None
    assert "only 0 pairs of samples are neighbors in both" in alone["verdict"]


def test_no_verdict_if_few_samples_have_a_common_neighbor():
    rng = np.random.default_rng(2)
    n = 600
    shape, color = rng.integers(6, size=n), rng.integers(6, size=n)
    of_shape, of_color = (4 * np.eye(6)[k] + rng.normal(size=(n, 6)) for k in (shape, color))
    result = judge(of_shape, of_color, shape, color)
    assert result["better"] is None and result["probability"] is None
    share = result["evidence"]["samples with such a neighbor, %"]
    assert share < 33
    assert f"only {share:.0f} % of the samples have a common neighbor" in result["reason"]
    assert result["verdict"].startswith("Which is better cannot be told without labels: only")


def test_no_verdict_if_the_probability_depends_on_the_samples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 6))  # without clusters
    a, b = (np.digitize(x[:, i], [-0.5, 0.5]) for i in (0, 1))
    result = judge(x, x, a, b)
    assert result["better"] is None and result["probability"] is None
    assert result["reason"].startswith("with other samples the probability would be anywhere from")
    true = np.arange(300) % 5
    assert judge(blobs(1), blobs(2), true, np.roll(true, 1))["reason"] is None


def test_the_page_and_its_numbers_report_no_verdict(photo_run, copy, monkeypatch, capsys):
    monkeypatch.setattr("ssl_kd_explore.compare.judgement.LEAST_COVERED", 1.01)
    Run.open(copy).curation.merge([1, 2], "both")
    assert main(["compare", str(copy), str(photo_run)]) == 0
    page = copy / f"compare-{photo_run.name}.html"
    judgement = json.loads(page.with_suffix(".json").read_text())["judgement"]
    assert judgement["better"] is judgement["probability"] is None
    sentence = f"Which is better cannot be told without labels: {judgement['reason']}."
    assert sentence in capsys.readouterr().out and sentence in Reader(page.read_text()).text
