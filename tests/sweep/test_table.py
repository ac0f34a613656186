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


def test_a_setting_that_changes_no_result_is_a_group_if_the_sweep_varies_it(tmp_path):
    runs = {f"log_every-{n}_seed-{s}": {"log_every": f"{n}", "seed": f"{s}"} for n, s in
            [(5, 0), (5, 1), (20, 0), (20, 1)]}  # fmt: skip
    for name, own in runs.items():
        write_run(
            tmp_path / name, LOG_EVERY=int(own["log_every"]), SEED=int(own["seed"]), acc=0.5,
            REPORT_TO=name,
        )  # fmt: skip
    assert len(table_of(tmp_path).groups) == 1
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": runs}))
    groups = table_of(tmp_path).groups
    assert [group.settings for group in groups] == [{"LOG_EVERY": 5}, {"LOG_EVERY": 20}]
    assert [len(group.records) for group in groups] == [2, 2]


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


def test_latex_is_valid_for_backslashes_signs_and_commands_of_several_lines(tmp_path):
    for name, acc in (("a^b", 0.6), ("~\\x", 0.5)):
        write_run(tmp_path / name, HEAD=name, SEED=0, acc=acc)
    config = json.loads((tmp_path / "a^b" / "config.json").read_text())
    config["command"] = "ssl_kd train --x 'one\ntwo'"
    (tmp_path / "a^b" / "config.json").write_text(json.dumps(config))
    text = latex(table_of(tmp_path))
    assert r"a\textasciicircum{}b & 1" in text
    assert r"\textasciitilde{}\textbackslash{}x & 1" in text
    assert "& $-$10.0 " in text
    assert not any(line.startswith("two") for line in text.splitlines())


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
    assert "different numbers of seeds" in notes


def test_a_run_is_read_once_although_a_link_leads_to_it(folder):
    (folder / "latest").symlink_to("0.5_0")
    for paths in ([f"{folder}/*"], [folder / "latest", folder], [folder, folder / "latest"]):
        records, _ = read_runs(paths)
        assert sorted(record.path for record in records) == sorted(folder.glob("0*"))
    assert [record.path.name for record in read_runs([folder / "latest"])[0]] == ["latest"]


def test_a_folder_with_the_characters_of_a_pattern_is_found(tmp_path):
    write_run(tmp_path / "a[1]", SEED=0, acc=0.5)
    assert len(read_runs([tmp_path / "a[1]"])[0]) == 1


def test_runs_of_one_seed_count_once(folder):
    for n in range(3):
        write_run(folder / f"again{n}", BETA=0.5, SEED=0, LOG_EVERY=20, acc=ACC[0.5][0])
    table = table_of(folder)
    mean = table.groups[0].mean("acc")
    low, high = stats.t.interval(0.95, 2, loc=0.82, scale=stats.sem(ACC[0.5]))
    assert (mean.value, mean.n) == (pytest.approx(0.82), 3)
    assert mean.half == pytest.approx((high - low) / 2)
    assert "Several runs have the same seed" in " ".join(table.notes)


def test_settings_that_do_not_change_the_result_make_no_groups(folder):
    write_run(folder / "more", BETA=0.6, SEED=9, LOG_EVERY=5, EMBEDDINGS_DIR="elsewhere", acc=0.1)
    groups = table_of(folder).groups
    assert [group.settings for group in groups] == [{"BETA": 0.5}, {"BETA": 0.6}, {"BETA": 0.7}]


def test_runs_of_two_modes_are_refused(folder):
    (folder / "student").mkdir()
    about = {"mode": "language", "settings": {"SEED": 0}}
    (folder / "student" / "config.json").write_text(json.dumps(about))
    (folder / "student" / "metrics.json").write_text("{}")
    with pytest.raises(InputError, match="student is of mode language: give one mode's runs"):
        table_of(folder)


@pytest.mark.parametrize("name", ["config.json", "metrics.json"])
@pytest.mark.parametrize("text", ["{bad", "[1]", ""])
def test_a_run_with_damaged_files_is_left_out_and_named(folder, name, text):
    (folder / "0.5_0" / name).write_text(text)
    records, unfinished = read_runs([folder])
    assert len(records) == 8
    assert unfinished[0].why.startswith(str(folder / "0.5_0" / name))


def test_a_score_that_is_not_finite_is_none(folder):
    metrics = json.loads((folder / "0.5_0" / "metrics.json").read_text())
    (folder / "0.5_0" / "metrics.json").write_text(json.dumps(metrics | {"knn_accuracy": math.nan}))
    assert table_of(folder).groups[0].mean("knn_accuracy") is None


def test_a_chosen_head_without_criterion_is_left_out_of_its_mean(folder):
    metrics = json.loads((folder / "0.5_0" / "metrics.json").read_text())
    metrics["heads"][0]["criterion"] = None
    (folder / "0.5_0" / "metrics.json").write_text(json.dumps(metrics))
    assert read_runs([folder / "0.5_0"])[0][0].scores["criterion"] == 1.0


def test_the_baseline_can_be_named_as_the_message_shows_it(tmp_path):
    for name in ("a,b", "c"):
        write_run(tmp_path / name, HEAD=name, SEED=0, acc=0.5)
    table = table_of(tmp_path, against="head=a,b")
    assert table.base.settings == {"HEAD": "a,b"}


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
