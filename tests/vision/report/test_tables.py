"""The tables on the screen."""

import io

from rich.console import Console

from ssl_kd.language.report.tables import SCORES, language_table
from ssl_kd.vision.evaluate import METRICS
from ssl_kd.vision.report.tables import results_table


def test_a_table_without_labels_shows_dashes_and_no_title():
    screen = Console(file=io.StringIO(), width=120)
    about = {"dataset": {"n_train": 9, "n_labelled": 0}}
    rows = [{"name": "[k]-means", "split": "train", "note": "no labels"}]
    screen.print(results_table({"table": rows, **about}))
    screen.print(results_table({"table": [], **about}))
    assert isinstance(screen.file, io.StringIO)
    assert "[k]-means" in screen.file.getvalue()


def test_every_metric_is_a_column_in_80_columns():
    screen = Console(file=io.StringIO(), width=80)
    scores = {key: 1 - column / 100 for column, key in enumerate(METRICS)}
    row = {"name": "best head, chosen by labels", "split": "train", **scores, "note": "head 12"}
    screen.print(results_table({"table": [row], "dataset": {"n_train": 9, "n_labelled": 9}}))
    assert isinstance(screen.file, io.StringIO)
    lines = [line.split() for line in screen.file.getvalue().splitlines()]
    names = [metric.name for metric in METRICS.values()]
    assert ["answer", "split", *names, "note"] in lines
    shown = [f"{100 * score:.1f}" for score in scores.values()]
    assert [*row["name"].split(), "train", *shown, "head", "12"] in lines


def test_the_scores_of_a_language_run_fit_into_a_terminal():
    row = {"perplexity": 4016.401, "bits_per_byte": 3.25, "agreement": 1.0, "kl": 6.768}
    row |= {"acceptance": 0.207, "ece": 0.019, "repetition": 0.964}
    names = ("teacher", "student before", "student")
    for more in ({}, {"answer_accuracy": 0.25, "answer_rate": 1.0}):
        screen = Console(file=io.StringIO(), width=80)
        screen.print(language_table({"table": [{"name": name, **row, **more} for name in names]}))
        assert isinstance(screen.file, io.StringIO)
        shown = screen.file.getvalue()
        assert "\u2026" not in shown and shown.count("4,016") == 3
        assert shown.count("20.7") == shown.count("96.4") == 3
        assert shown.count("25.0") == (3 if more else 0)
        assert shown.count("100.0") == (6 if more else 3)  # agreement, questions answered
        assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())


def test_older_runs_keep_their_bits_per_character():
    assert SCORES["bits_per_byte"][0] == "bits per byte"
    screen = Console(file=io.StringIO(), width=80)
    screen.print(language_table({"table": [{"name": "student", "bits_per_character": 3.25}]}))
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert "bits per character" in shown and "3.25" in shown and "bits per byte" not in shown


def test_perplexities_over_two_tokenizers_are_not_compared():
    screen = Console(file=io.StringIO(), width=80)
    screen.print(
        language_table({"table": [{"name": "a[b]", "perplexity": 4.5}], "alignment": {"a": 1}})
    )
    assert isinstance(screen.file, io.StringIO)
    shown = " ".join(screen.file.getvalue().split())
    assert "two tokenizers" in shown and "a[b]" in shown and "4.5" not in shown
