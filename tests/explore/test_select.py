"""`ssl_kd select` and the methods of `Run` behind it."""

import csv
import shutil

import numpy as np
import pytest

from ssl_kd import Run
from ssl_kd.cli import main
from ssl_kd.core.errors import InputError
from ssl_kd_explore.selection_methods import METHODS


@pytest.fixture
def folder(photo_run, tmp_path):
    """The folder of a run that a test may decide about."""
    return shutil.copytree(photo_run, tmp_path / "copy")


def rows_of(file):
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("by", ["typical", "diverse", "balanced"])
def test_a_table_names_the_chosen_samples(folder, by, capsys):
    assert main(["select", str(folder), "--n", "6", "--by", by]) == 0
    assert f"6 samples by {by}." in capsys.readouterr().out
    rows = rows_of(folder / "selected.csv")
    run = Run.open(folder)
    assert len({row["file"] for row in rows}) == 6
    for row in rows:
        assert run.samples.column("file")[int(row["row"])] == row["file"]
        assert run.samples.column("cluster")[int(row["row"])] == int(row["cluster"])


def test_balanced_samples_are_of_all_clusters_after_all_decisions(folder):
    run = Run.open(folder)
    names = [run.samples.column("file")[row] for row in run.clusters[0].rows[:3]]
    run.curation.exclude(run.clusters[0].rows[:3])
    table = Run.open(folder).select(6, "balanced").to_pydict()
    assert sorted(table["cluster"]) == [0, 0, 1, 1, 2, 2]
    assert not set(table["file"]) & set(names)


def test_a_selection_is_continued(folder, tmp_path):
    first, second = folder / "first.csv", tmp_path / "second.csv"
    words = ["select", str(folder), "--n", "5", "--by", "diverse"]
    assert main([*words, "--out", str(first)]) == 0
    assert main([*words, "--start", str(first), "--out", str(second)]) == 0
    whole = Run.open(folder).select(10, "diverse").to_pydict()["file"]
    assert [row["file"] for row in (*rows_of(first), *rows_of(second))] == whole


def test_samples_near_one_that_is_named(folder, tmp_path):
    run = Run.open(folder)
    name = run.samples.column("file", "train")[0]
    out = tmp_path / "near.csv"
    words = ["--n", "4", "--by", "near", "--near", name, "--out", str(out)]
    assert main(["select", str(folder), *words]) == 0
    rows = rows_of(out)
    assert rows[0]["file"] == name
    assert float(rows[0]["score"]) == pytest.approx(1, abs=1e-5)
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True)


def test_held_out_samples_have_no_copy_among_the_others(folder, capsys):
    assert main(["select", str(folder), "--validation", "0.25"]) == 0
    run = Run.open(folder)
    held_out = {int(row["row"]) for row in rows_of(folder / "held_out.csv")}
    train = len(run.samples.splits["train"])
    assert len(held_out) / train == pytest.approx(0.25, abs=0.05)
    start = run.samples.splits["train"].start
    for group in run.duplicates("train").groups():
        assert len({start + row in held_out for row in group.tolist()}) == 1
    clusters = run.samples.column("cluster")[sorted(held_out)]
    assert len(np.unique(clusters)) == 3


def test_an_existing_table_is_kept_without_force(folder, capsys):
    words = ["select", str(folder), "--n", "3"]
    assert main(words) == 0
    before = (folder / "selected.csv").read_text()
    assert main([*words, "--by", "diverse"]) == 2
    assert "--force" in capsys.readouterr().err
    assert (folder / "selected.csv").read_text() == before
    assert main([*words, "--by", "diverse", "--force"]) == 0
    assert (folder / "selected.csv").read_text() != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either --n, the number of samples, or --validation"),
        (["--n", "3", "--validation", "0.1"], "either --n"),
        (["--validation", "1.5"], "between 0 and 1, got 1.5"),
        (["--n", "3", "--by", "near"], "--by near and --near NAME belong together"),
        (["--n", "3", "--near", "a.png"], "--by near and --near NAME belong together"),
        (["--n", "3", "--by", "near", "--near", "no.png"], "there is no sample 'no.png'"),
        (["--n", "100000"], "expected a number from 1 to"),
        (["--n", "3", "--split", "tset"], "--split is 'tset'; expected one of train"),
    ],
)
def test_bad_words_are_refused_and_nothing_is_written(folder, words, message, capsys):
    assert main(["select", str(folder), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "selected.csv").exists()


def test_a_start_that_is_no_selection_is_refused(folder, tmp_path, capsys):
    file = tmp_path / "other.csv"
    file.write_text("name\na.png\n")
    assert main(["select", str(folder), "--n", "3", "--start", str(file)]) == 2
    assert "has no column file" in capsys.readouterr().err


def test_an_unknown_method_is_refused(folder):
    known = ", ".join(METHODS)
    with pytest.raises(InputError, match=f"by is 'random'; expected one of {known}"):
        Run.open(folder).select(3, "random")


def test_the_methods_of_the_command_are_those_of_run_select(folder):
    run = Run.open(folder)
    name = run.samples.column("file", "train").tolist()[0]
    for method in METHODS:
        near = name if method == "near" else None
        assert len(run.select(2, method, near=near)) == 2
        assert f"`{method}`" in str(Run.select.__doc__)
