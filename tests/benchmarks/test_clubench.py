"""Test the comparison with CLUBench on a checkout made here."""

import pickle
import sys
from fractions import Fraction

import numpy as np
import pytest

from benchmarks import clubench
from benchmarks.clubench import Published, report, sets
from benchmarks.peers import Method

NAMES = ("zoo", "COIL20_CLIP", "iris", "wine", "breast_cancer_wisconsin_prognostic", "mnist64")
SPECTRAL = {"hpc-1": [0.5, 0.9, 0.5, 0.5, 0.5, 0.5], "hpc-2": [0.7, 0.1, 0.6, 0.4, 0.5, 0.5]}
KMEANS = {"hpc-1": [0.6, 0.4, 0.4, 0.38, 0.4, 0.4], "hpc-2": [0.8, 0.1, 0.4, 0.4, 0.4, 0.4]}


@pytest.fixture
def checkout(tmp_path):
    scores = tmp_path / "performance_matrix" / "all_hpcs"
    datasets = tmp_path / "CLUBench" / "datasets"
    for folder in (scores, datasets):
        folder.mkdir(parents=True)
    config = "DATASETS = [\n" + "".join(f"    '{name}.npz', \n" for name in NAMES) + "]\n"
    (tmp_path / "CLUBench" / "configs.py").write_text(config)
    tables = {"spectral_clustering": SPECTRAL, "kmeans": KMEANS, "dbscan": {"hpc-1": [1.0] * 6}}
    for name, table in tables.items():
        (scores / f"{name}.p").write_bytes(pickle.dumps({"acc": table}))
    x = np.arange(20, dtype=np.int64)[:, None] * [1, 7, 0]
    np.savez(datasets / "zoo.npz", x=x, y=np.repeat([3, 5], 10))
    (datasets / "COIL20_CLIP.npz").write_text("damaged")
    return tmp_path


def test_the_fixed_setting_is_best_on_average_and_labels_choose_per_set(checkout):
    published = Published(checkout)
    assert published.names == list(NAMES) and set(published.accuracy) == {
        "spectral_clustering",
        "kmeans",
    }
    assert np.allclose(published.fixed("spectral_clustering"), [50, 90, 50, 50, 50, 50])
    assert np.allclose(published.with_labels("spectral_clustering"), [70, 90, 60, 50, 50, 50])


def test_sets_of_the_other_shelf_are_not_opened(checkout):
    every = sets(checkout, NAMES, "choose")
    assert list(every) == ["wine", "breast_cancer_wisconsin_prognostic", "mnist64", "zoo"]
    x, y = every["zoo"]
    assert np.allclose(x.mean(0), 0, atol=1e-6) and y.tolist() == [0] * 10 + [1] * 10
    assert np.allclose(x.std(0), [1, 1, 0], atol=1e-5)
    with pytest.raises(ValueError, match="allow_pickle|pickled"):
        sets(checkout, NAMES, "both")


def test_a_set_without_published_scores_is_refused_before_it_is_run(checkout):
    with pytest.raises(ValueError, match="no scores of wine: "):
        sets(checkout, [name for name in NAMES if name != "wine"], "choose")


def test_scores_are_compared_on_the_sets_that_ran(checkout):
    published = Published(checkout)
    every = {name: sets(checkout, NAMES, "choose")[name] for name in ("zoo", "wine")}
    here = {"ssl_kd": {"zoo": 65.0, "wine": 45.0}, "kmeans": {"zoo": 62.0, "wine": 40.0}}
    lines = report(published, here, every).splitlines()
    assert lines[2:7] == [
        "| **ssl_kd** | 55.0 |  |",
        "| k-means here | 51.0 |  |",
        "| spectral clustering | 50.0 | 60.0 |",
        "| kmeans | 49.0 | 60.0 |",
        "| best of all published for each set |  | 65.0 |",
    ]
    assert lines[-2:] == [
        "| wine | 178 | 13 | 3 | 45.0 | 40.0 | 50.0 | 50.0 | 50.0 |",
        "| zoo | 20 | 3 | 2 | 65.0 | 62.0 | 50.0 | 70.0 | 80.0 |",
    ]


def test_a_run_prints_the_tables(checkout, monkeypatch, capsys):
    def halves(x, n_clusters, seed):
        return (x[:, 0] > 0).astype(int)

    methods = {name: Method(name, halves) for name in ("ssl_kd", "kmeans")}
    monkeypatch.setattr(clubench, "METHODS", methods)
    monkeypatch.setattr(sys, "argv", ["clubench", str(checkout), "--seeds", "2"])
    clubench.main()
    output = capsys.readouterr().out
    assert output.startswith("Sets of the shelf `choose`: 4.\n")
    assert "| zoo | 20 | 3 | 2 | 100.0 | 100.0 | 50.0 | 70.0 | 80.0 |" in output


def test_a_wrong_folder_or_file_is_refused(checkout):
    with pytest.raises(FileNotFoundError, match="clone https"):
        Published(checkout / "CLUBench")
    file = checkout / "performance_matrix" / "all_hpcs" / "kmeans.p"
    file.write_bytes(pickle.dumps({"acc": {"hpc-1": [1.0]}}))
    with pytest.raises(ValueError, match=r"\(1,\) sets, expected 6"):
        Published(checkout)
    file.write_bytes(pickle.dumps({"acc": {"hpc-1": [Fraction(1, 2)] * 6}}))
    with pytest.raises(pickle.UnpicklingError, match="found fractions"):
        Published(checkout)
