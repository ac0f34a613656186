import csv
import io
import json
import math

import pytest
from scipy import stats

import ssl_kd
from ssl_kd.cli import main
from ssl_kd.core.errors import InputError
from ssl_kd.sweep.records import read_runs
from ssl_kd.sweep.statistics import Mean, differences, holm
from ssl_kd.sweep.table import RunTable, latex, markdown

ACC = {0.5: [0.80, 0.82, 0.84], 0.6: [0.83, 0.84, 0.88], 0.7: [0.80, 0.81, 0.85]}


def write_run(folder, *, commit="abc", **settings):
    """Write the files of a finished clustering run."""
    acc = settings.pop("acc")
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "settings": settings,
        "commit": commit,
        "command": f"ssl_kd train --name {folder.name}",
    }
    (folder / "config.json").write_text(json.dumps(about))
    rows = [
        {"name": "consensus", "split": "train", "acc": 0.1},
        {"name": "consensus", "split": "test", "acc": acc, "nmi": 0.5},
        {"name": "k-means", "split": "test", "acc": 0.2},
    ]
    heads = [
        {"criterion": 2.0, "chosen": True},
        {"criterion": 1.0, "chosen": True},
        {"criterion": 9.0, "chosen": False},
    ]
    metrics = {"table": rows, "heads": heads, "events": 1, "seconds": {"total": 3.0}}
    (folder / "metrics.json").write_text(json.dumps(metrics | {"knn_accuracy": 0.9}))


@pytest.fixture
def folder(tmp_path):
    for beta, values in ACC.items():
        for seed, acc in enumerate(values):
            write_run(tmp_path / f"{beta}_{seed}", BETA=beta, SEED=seed, LOG_EVERY=20, acc=acc)
    return tmp_path


def table_of(folder, **options):
    return RunTable.of(*read_runs([folder]), **options)


def test_scores_are_those_of_the_answer_on_held_out_data(folder):
    record = read_runs([folder / "0.5_0"])[0][0]
    assert record.scores == {
        **{"acc": 0.8, "nmi": 0.5, "knn_accuracy": 0.9, "criterion": 1.5},
        **{"faults": 1.0, "seconds": 3.0},
    }


def test_groups_differ_in_settings_that_vary_and_not_in_the_seed(folder):
    groups = table_of(folder).groups
    assert [group.settings for group in groups] == [{"BETA": 0.5}, {"BETA": 0.6}, {"BETA": 0.7}]
    assert [len(group.records) for group in groups] == [3, 3, 3]


def test_the_interval_is_that_of_students_t(folder):
    mean = table_of(folder).groups[0].mean("acc")
    low, high = stats.t.interval(0.95, 2, loc=0.82, scale=stats.sem(ACC[0.5]))
    assert mean.value == pytest.approx((low + high) / 2)
    assert mean.half == pytest.approx((high - low) / 2)


def test_differences_are_paired_by_seed_and_tested_with_holms_correction(folder):
    table = table_of(folder)
    _, first, second = table.compared("acc")
    p_values = [stats.ttest_rel(ACC[beta], ACC[0.5]).pvalue for beta in (0.6, 0.7)]
    assert first.mean.value == pytest.approx(0.03)
    assert first.p == pytest.approx(2 * min(p_values))
    assert second.p == pytest.approx(max(p_values))


def test_a_seed_that_one_group_lacks_is_left_out_of_the_difference(folder):
    write_run(folder / "more", BETA=0.6, SEED=9, LOG_EVERY=20, acc=0.1)
    difference = table_of(folder).compared("acc")[1]
    assert difference.mean.n == 3
    assert difference.mean.value == pytest.approx(0.03)


def test_holm_equals_the_published_steps():
    # p (1) to p (4), by Holm 1979: the smallest times 4, the next times 3, never below the last.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_equal_runs_have_no_significant_difference(folder):
    groups = table_of(folder).groups
    assert [d.p for d in differences(groups, groups[0], "nmi") if d] == [1.0, 1.0]
    assert Mean.of([0.5, 0.5]).half == 0


def test_the_baseline_is_chosen_by_its_settings(folder):
    table = table_of(folder, against="beta=0.6")
    assert table.base.settings == {"BETA": 0.6}
    with pytest.raises(InputError, match=r"--against is 'beta=1', which fits 0 of the 3 groups"):
        table_of(folder, against="beta=1")


def test_the_best_of_each_column_is_bold_where_groups_differ(folder):
    text = markdown(table_of(folder, scores=["acc", "nmi"]))
    assert "| 0.6 | 3 | **85.0 ± 6.6** | 50.0 |" in text
    assert "| 0.5 | 3 | 82.0 ± 5.0 | 50.0 |" in text


def test_a_significant_difference_is_bold_and_marked(tmp_path):
    for beta, values in {0.5: [0.5, 0.6, 0.7], 0.6: [0.601, 0.702, 0.801]}.items():
        for seed, acc in enumerate(values):
            write_run(tmp_path / f"{beta}_{seed}", BETA=beta, SEED=seed, acc=acc)
    text = markdown(table_of(tmp_path))
    assert "| 0.6 | **+10.1 ± 0.1**\\* |" in text
    assert "k-NN" not in text.partition("Difference")[2]  # it is the same in all runs


def test_fewer_seconds_are_better(tmp_path):
    for beta, seconds in ((0.5, 9.0), (0.6, 4.0)):
        run = tmp_path / f"{beta}"
        write_run(run, BETA=beta, SEED=0, acc=0.5)
        metrics = json.loads((run / "metrics.json").read_text()) | {"seconds": {"total": seconds}}
        (run / "metrics.json").write_text(json.dumps(metrics))
    assert "| 0.6 | 1 | **4** |" in markdown(table_of(tmp_path, scores=["seconds"]))


def test_markdown_and_latex_name_commit_folder_and_command_of_every_run(folder):
    table = table_of(folder)
    for text in (markdown(table), latex(table)):
        assert text.count("commit abc") == 9
        assert f"{folder / '0.6_2'}: ssl_kd train --name 0.6_2" in text


def test_latex_escapes_its_special_characters(tmp_path):
    for name, acc in (("a_b", 0.5), ("c&d", 0.6)):
        write_run(tmp_path / name, HEAD=name, SEED=0, acc=acc)
    text = latex(table_of(tmp_path))
    assert r"a\_b & 1" in text
    assert r"c\&d & 1" in text
    assert r"ACC, \%" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 2


def test_csv_holds_unrounded_numbers(folder, tmp_path, capsys):
    out = tmp_path / "table.csv"
    assert main(["table", str(folder), "--scores", "acc", "--out", str(out)]) == 0
    rows = list(csv.DictReader(io.StringIO(out.read_text())))
    assert [row["beta"] for row in rows] == ["0.5", "0.6", "0.7"]
    assert float(rows[1]["acc"]) == pytest.approx(0.85)
    assert float(rows[1]["acc_difference"]) == pytest.approx(0.03)
    assert rows[0]["acc_p"] == ""
    assert rows[2]["folders"].split() == [str(folder / f"0.7_{seed}") for seed in range(3)]


def test_unfinished_and_failed_runs_are_listed_and_left_out(folder, capsys):
    (folder / "open").mkdir()
    (folder / "open" / "config.json").write_text("{}")
    (folder / "logs").mkdir()
    failure = {"code": 3, "reason": "no part was healthy"}
    (folder / "logs" / "open.failed.json").write_text(json.dumps(failure))
    assert main(["table", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert f"Left out: {folder / 'open'}: failed with code 3: no part was healthy" in printed


def test_runs_of_two_commits_are_pointed_out(folder):
    write_run(folder / "other", BETA=0.6, SEED=9, LOG_EVERY=20, acc=0.8, commit="def")
    notes = " ".join(table_of(folder).notes)
    assert "The runs are of 2 commits: abc, def." in notes
    assert "different numbers of runs" in notes


def test_a_score_that_one_run_of_a_group_lacks_is_not_averaged(folder):
    metrics = json.loads((folder / "0.5_0" / "metrics.json").read_text())
    del metrics["knn_accuracy"]
    (folder / "0.5_0" / "metrics.json").write_text(json.dumps(metrics))
    assert table_of(folder).groups[0].mean("knn_accuracy") is None
    assert "| 0.5 | 3 | - |" in markdown(table_of(folder, scores=["knn_accuracy"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scores", "acd"], "known: acc"),
        (["--out", "table.txt"], "expected a file that ends with .csv, .md, .tex"),
        (["--against", "beta=9"], "fits 0 of the 3 groups"),
    ],
)
def test_bad_words_are_refused(folder, capsys, words, message):
    assert main(["table", str(folder), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_path_without_runs_is_refused(tmp_path, capsys):
    assert main(["table", str(tmp_path / "none*")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_runs_are_a_data_frame(folder):
    pytest.importorskip("pandas")
    frame = ssl_kd.runs(folder)
    assert frame.groupby("BETA")["acc"].mean().tolist() == pytest.approx([0.82, 0.85, 0.82])
    assert {"path", "commit", "command", "seconds"} <= set(frame.columns)
    assert len(ssl_kd.runs(f"{folder}/0.5_*")) == 3


def test_a_student_is_scored_by_its_own_row(tmp_path):
    run = tmp_path / "r"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"mode": "language", "settings": {"SEED": 0}}))
    rows = [
        {"name": "student before", "perplexity": 99.0},
        {"name": "student", "perplexity": 7.5, "bits_per_byte": 1.25, "kl": None},
    ]
    (run / "metrics.json").write_text(json.dumps({"table": rows, "events": 0, "seconds": {}}))
    record = read_runs([run])[0][0]
    assert record.scores == {"perplexity": 7.5, "bits_per_byte": 1.25, "faults": 0.0}
    assert not math.isnan(record.scores["perplexity"])
