"""The report of a language run, from run folders as a run writes them."""

import json
import re
from pathlib import Path

import pytest

from ssl_kd.language.report.page import write_report
from tests.vision.report.reading import change, check_that_nothing_is_loaded, put, write_and_read

PROMPTS = ("Once upon a time", "The little dog")


@pytest.fixture
def run(tmp_path) -> Path:
    """A finished run of 200 steps with a cache and questions."""
    folder = tmp_path / "run-1"
    folder.mkdir()
    put(folder, "config.json", {
        "mode": "language", "settings": {"TEMPERATURE": 2.0, "SEED": 0},
        "versions": {"torch": "2.15.0"}, "commit": "0123abc",
        "command": "python scripts/distill.py --preset stable",
        "precision": "cpu: everything in fp32",
        "teacher": {"name": "stories-3m", "parameters": 3_412_992, "vocabulary": 2048, "layers": 8},
        "student": {"name": "layers:2", "parameters": 901_120, "trained": 8192,
                    "vocabulary": 2048, "layers": 2},
        "data": {"name": "/home/me/stories.jsonl", "train_tokens": 1_234_567, "eval_tokens": 51_200,
                 "documents": 4321,
                 "left_out": ["stories.jsonl:17: empty", "stories.jsonl:90"]}})  # fmt: skip
    put(folder, "metrics.json", {
        "best_step": 150, "steps": 200, "tokens": 409_600, "success_rate": 0.99,
        "events": 3, "seconds": {"teacher": 3.0, "train": 80.2, "total": 110.4},
        "table": [
            {"name": "teacher", "perplexity": 9.871, "bits_per_byte": 0.91, "agreement": 1.0,
             "kl": 0.0, "ece": 0.011, "answer_accuracy": None, "answer_rate": None, "left_out": 0},
            {"name": "student before", "perplexity": 2051.4, "bits_per_byte": 3.02,
             "agreement": 0.004, "kl": 5.83, "ece": 0.21, "answer_accuracy": 0.0,
             "answer_rate": 0.0, "n": 40, "interval": [0.0, 0.088], "left_out": 2},
            {"name": "student", "perplexity": 12.35, "bits_per_byte": 0.99, "agreement": 0.684,
             "kl": 0.311, "ece": 0.022, "answer_accuracy": 0.35, "answer_rate": 0.9,
             "n": 40, "interval": [0.221, 0.505], "left_out": 0},
        ],
        "cache": {"method": "top-k", "k": 64, "bytes_per_token": 260.0, "tail_mass": 0.0132,
                  "fidelity_kl": 0.0071},
        "alignment": None,
        "generations": [{"prompt": p, "teacher": f"{p}, he ran.", "before": f"{p} xq xq",
                         "after": f"{p}, she ran.", "reference": None} for p in PROMPTS],
    })  # fmt: skip
    lines = []
    for step in range(0, 200, 10):
        lines.append({"step": step, "train_loss": 5 - step / 60, "kd": 9 - step / 40,
                      "ce": 7.5 - step / 40, "grad_norm": 0.4, "learning_rate": 1e-3,
                      "success_rate": 0.5 if step == 80 else 1.0, "consecutive_nans": 0,
                      "gpu_memory_gb": None, "tokens_per_second": 5000.0 + step})  # fmt: skip
    perplexities = {0: 2051.4, 50: 90.3, 100: 20.1, 150: 12.35, 200: 12.9}
    lines += [{"step": s, "eval": {"perplexity": p, "kl": 1.0}} for s, p in perplexities.items()]
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "events.jsonl", [
        {"step": 30, "part": "kd", "stage": "loss", "reason": "not finite", "action": "cut out",
         "value": None},
        {"step": 31, "part": "kd", "stage": "loss", "reason": "not finite",
         "action": "cut out, 2 times in a row: lower the temperature", "value": None},
        {"step": 32, "part": "kd", "stage": "loss", "reason": "healthy again after 2 steps",
         "action": "used again", "value": None},
        {"step": 80, "part": "model", "stage": "gradient", "reason": "too large",
         "action": "skipped", "value": 1e30},
    ])  # fmt: skip
    return folder


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_row(folder: Path, name: str, /, **new) -> None:
    """Change one row of the table; `gone=True` takes it out."""
    table = json.loads((folder / "metrics.json").read_text())["table"]
    rows = [row | new if row["name"] == name else row for row in table]
    change(folder, "metrics.json", table=[row for row in rows if not row.get("gone")])


def headline(folder: Path) -> str:
    match = re.search("<h1>(.*?)</h1>", write_and_read(folder, write_report)[0])
    assert match
    return match[1]


def test_headline_compares_the_student_with_its_start_and_its_teacher(run):
    _, page = write_and_read(run, write_report)
    assert headline(run) == (
        "Held-out perplexity 12.35, 2,051 before training, 9.871 for the teacher"
    )
    assert "The whole run took 2 min." in page.text
    assert "compare a run with --alpha_kd 0 --alpha_ce 1" in page.text
    change_row(run, "student before", gone=True)
    change_row(run, "teacher", perplexity=float("nan"))
    assert headline(run) == "Held-out perplexity 12.35"


def test_a_run_without_a_teacher_is_logged_as_such(run):
    change(run, "config.json", teacher=None)
    change(run, "metrics.json", cache=None)
    change_row(run, "teacher", gone=True)
    _, page = write_and_read(run, write_report)
    assert "Without a teacher: the student was trained by cross-entropy alone." in page.text
    assert "cache: " not in page.text and "--alpha_kd 0" not in page.text


def test_all_numbers_of_the_run_are_there(run):
    source, page = write_and_read(run, write_report)
    for expected in (
        *("bits per byte", "0.99", "68.4", "0.311", "2.2", "35.0", "90.0"),
        *("40 questions, 22.1 to 50.5 % of them right (95 % interval)",),
        *("evaluation batches left out, not finite: 2", "steps200", "tokens409,600"),
        *("tokens per second5,095", "12.35 at step 150", "success rate, %99"),
        *("top-k", "64", "260", "0.0132", "0.0071", "time of teacher3.0 s"),
        *(
            "80 s",
            "bytes per token",
            "tail mass",
            "3,412,992",
            "901,120",
            "2,048",
            "layers:2",
            "stories-3m",
        ),
        *("documents4,321", "training tokens1,234,567", "held-out tokens51,200"),
        *(
            "Left out, shortened or split",
            "8,192",
            "stories.jsonl:17: empty",
            "TEMPERATURE",
            "2.15.0",
            "0123abc",
        ),
        *("python scripts/distill.py --preset stable", "cpu: everything in fp32"),
        *("Once upon a time, she ran.", "The little dog xq xq", "The little dog, he ran."),
    ):
        assert expected in page.text, expected
    assert set(re.findall(r'<p class="missing">(.*?)</p>', source)) == {"none"}  # no references
    assert page.tags.count("svg") == 2
    curve = source[source.index('aria-label="held-out perplexity') :]
    assert ">12.35</text>" in curve[: curve.index("</svg>")]  # the best step is marked


def test_across_tokenizers_perplexity_is_not_compared_with_the_teacher(run):
    assert ">teacher 9.871<" in write_and_read(run, write_report)[0]
    change(run, "metrics.json", alignment={"coverage": 1.0})
    source, page = write_and_read(run, write_report)
    assert "coverage" in page.text
    assert "for the teacher" not in headline(run) and ">teacher 9.871<" not in source


def test_table_keeps_its_order_and_marks_the_best_student(run):
    def marked() -> list[str]:
        source, _ = write_and_read(run, write_report)
        return re.findall(r'<tr class="ours"><th scope="row">(.*?) <span', source)

    names = re.findall(
        r'<tr class="\w*"><th scope="row">([\w ]+?)(?= ?<)', write_and_read(run, write_report)[0]
    )
    assert names == ["teacher", "student before", "student"]
    assert marked() == ["student"]
    change_row(run, "student", perplexity=2052)
    assert marked() == ["student before"]
    change_row(run, "student before", perplexity=None)
    assert marked() == ["student"]


def test_page_is_one_file_that_loads_nothing(run):
    source, page = write_and_read(run, write_report)
    check_that_nothing_is_loaded(source, page)
    assert "img" not in page.tags and source == write_and_read(run, write_report)[0]


def test_user_text_is_inert(run):
    evil = ("<script>alert(1)</script>", "$x^{$", '"><img src=x onerror=alert(2)>', "日本 & \x00")
    change(run, "metrics.json", cache={evil[0]: evil[2]}, alignment={evil[0]: evil[2]},
           generations=[{"prompt": evil[0], "teacher": evil[1], "before": evil[2],
                         "after": "</pre><script>x</script>", "reference": evil[3]}])  # fmt: skip
    change(run, "config.json", command=evil[2], settings={evil[0]: evil[2]}, precision=evil[0],
           teacher={"name": evil[2]},
           data={"name": evil[0], "left_out": [evil[2], evil[0]]})  # fmt: skip
    change_row(run, "student before", name=evil[0])
    write_lines(run / "events.jsonl", [{"step": 3, "part": evil[0], "action": evil[2]}])
    source, page = write_and_read(run, write_report)
    assert "script" not in page.tags and "img" not in page.tags
    assert "<script" not in source and "<img src=x" not in source
    assert all(text in page.text for text in evil[:3]) and "</pre><script>x" in page.text


def test_guard_events_are_counted_and_listed(run):
    page = write_and_read(run, write_report)[1]
    assert "4 events on 2 parts: 2 cut out, 1 used again" in page.text
    assert "lower the temperature" in page.text and "1e+30" in page.text
    (run / "events.jsonl").write_text("")
    assert "No events: every loss" in write_and_read(run, write_report)[1].text


def test_empty_folder_of_a_language_run_says_what_is_missing(tmp_path):
    put(tmp_path, "config.json", {"mode": "language"})
    source, page = write_and_read(tmp_path, write_report)
    for what in (
        *("The student has no final score", "no metrics.json: the run has not ended"),
        *("no table of scores", "no loss curves", "no evaluation with a finite perplexity"),
        *("no generations", "No step was logged"),
        *("does not describe the models and the data"),
        *("holds no settings", "does not hold the command"),
    ):
        assert what in page.text, what
    assert page.tags.count("svg") == 0
    assert "No events" not in page.text
    put(tmp_path, "metrics.json", {"steps": 1})
    assert "metrics.json has no table of scores." in write_and_read(tmp_path, write_report)[1].text


def test_values_that_are_not_numbers_are_dashes_and_gaps(run):
    change_row(run, "student", perplexity=None, kl=float("nan"), ece=float("inf"), agreement=None)
    seconds = {"train": None, "total": float("nan")}
    cache = {"method": "top-k", "k": None, "tail_mass": float("nan")}
    change(run, "metrics.json", success_rate=None, seconds=seconds, cache=cache, tokens=None)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 210, "ce": null, "kd": NaN, "success_rate": null}\n')
        file.write('{"step": 210, "eval": {"perplexity": null}}\n')
    source, page = write_and_read(run, write_report)
    assert "The student has no final score" in page.text
    assert "has no finite perplexity of the student" in page.text
    assert "At its last evaluation, step 200, perplexity was 12.9." in page.text
    assert "No finite perplexity at step 210." in page.text
    assert "success rate, %97.5" in page.text  # the mean of the log
    row = source[source.index('<th scope="row">student<') :]
    cells = re.findall(r'<td class="n">(.*?)</td>', row[: row.index("</tr>")])
    assert cells == ["–", "0.99", "–", "–", "–", "35.0", "90.0"]
    assert not re.search(r"\b(nan|NaN|None|inf|null)\b", page.text)


def test_killed_run_with_half_a_line(run):
    (run / "metrics.json").unlink()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 210, "train_lo')
    source, page = write_and_read(run, write_report)
    assert "has not ended, or ended before its evaluation" in page.text
    assert "At its last evaluation, step 200, perplexity was 12.9." in page.text
    assert "12.35 at step 150" in page.text and "steps200" in page.text
    assert page.tags.count("svg") == 2
    assert "4 events on 2 parts" in page.text and "python scripts/distill.py" in page.text


def test_long_runs_stay_readable_and_small(run):
    write_lines(run / "metrics.jsonl", [{"step": s, "ce": 3.0, "kd": 2.0} for s in range(50_000)])
    change(run, "metrics.json",
           generations=[{"prompt": "p" * 9000, "teacher": "t" * 9000}] * 50)  # fmt: skip
    source, page = write_and_read(run, write_report)
    assert "12 of 50" in page.text and "ppp …" in page.text and len(source) < 500_000


def test_skipped_terms_and_useless_training_are_reported(run):
    metrics = json.loads((run / "metrics.json").read_text())
    metrics |= {"best_step": 0, "steps": 30, "learned_from": {"ce": 30, "kd": 12}}
    (run / "metrics.json").write_text(json.dumps(metrics))
    _, page = write_and_read(run, write_report)
    assert "9.871 for the teacher; kd learned from 12 of 30 steps" in page.text
    assert "No evaluation was better than the student before training" in page.text
    assert "ce learned from" not in page.text
