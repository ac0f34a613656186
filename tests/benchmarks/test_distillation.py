"""Test the choice of the best learning rate, and the whole search on tiny models."""

import json
import sys

import pytest

from benchmarks import distillation
from benchmarks.distillation import best_evaluation, best_rate, comparison


def row(validation, perplexity):
    return {"validation": validation, "perplexity": perplexity}


RESULTS = {
    ("distilled", 1e-3): [row(2.0, 1.0), row(2.2, 1.0)],  # the best on test rows
    ("distilled", 1e-2): [row(1.9, 10.0), row(1.9, 12.0)],
    ("CE alone", 1e-3): [row(2.1, 20.0), row(2.1, 16.0)],
    ("CE alone", 1e-2): [row(2.0, 30.0), row(2.3, 30.0)],  # better than 1e-3 with one seed alone
}


def test_validation_rows_choose_and_test_rows_are_reported():
    assert best_rate(RESULTS, "distilled") == 1e-2 and best_rate(RESULTS, "CE alone") == 1e-3
    ours, alone, ratio = comparison(RESULTS, [1e-4, 1e-3, 1e-2])
    assert ours == "distilled, best at 0.01 (an end of the grid): 11.00 (10.00 to 12.00)"
    assert alone == "CE alone, best at 0.001: 18.00 (16.00 to 20.00)"
    assert ratio.endswith(": 0.625 (0.500 to 0.750)")


def test_the_best_evaluation_is_of_validation_rows(tmp_path):
    lines = [
        {"step": 1, "ce": 0.1},
        *({"step": i, "eval": {"nll": x}} for i, x in ((1, 3), (2, 2))),
    ]
    lines.append({"step": 3, "eval": {"nll": None}})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert best_evaluation(tmp_path) == {"validation": 2}


@pytest.fixture
def printed(tiny, text_file, tmp_path, monkeypatch, capsys):
    """Run the benchmark on tiny models with additional flags and return its output."""

    def run(*flags):
        words = ["--seeds=1", "--max_steps=3", "--batch_size=4", "--block_size=24"]
        words += ["--eval_rows=8", "--student_model=fresh:1x16", "--data_path", text_file]
        words += ["--teacher_model", tiny.folder(tmp_path / "teacher"), *flags]
        monkeypatch.setattr(sys, "argv", ["distillation", *words])
        distillation.main()
        return capsys.readouterr().out

    return run


def test_each_run_is_a_row_below_the_teacher_and_the_untrained_student(printed):
    rows = [line.split(" | ") for line in printed("--only", "CE alone", "distilled").splitlines()]
    names = ["run", "teacher", "student, before training", "CE alone", "distilled"]
    assert [cells[0][2:] for cells in rows if len(cells) > 1] == names
    assert float(rows[-1][3]) > 0  # the KL to the teacher


def test_the_search_goes_through(printed):
    shown = printed("--grid", "1e-5", "1e-2")
    table = [line for line in shown.splitlines() if line.startswith("| ")]
    assert len(table) == 5 and "distilled, best at 0.01 (an end of the grid)" in shown
    assert "CE alone, best at 0.01" in shown
    assert pytest.approx(1, abs=0.5) == float(shown.split("paired by seed: ")[1].split()[0])
