"""`ssl_kd judge`: a finished student's scores on the screen and as JSON, and what it refuses."""

import json
import re

import pytest

from ssl_kd import cli
from ssl_kd.core.errors import BAD_INPUT, OK
from ssl_kd.language.run import run
from ssl_kd.language.settings import LanguageSettings
from tests.marks import slow

FLAGS = ["--block_size=24", "--eval_rows=8", "--generations=3", "--max_new_tokens=8"]


@pytest.fixture
def at(tmp_path, text_file, models, monkeypatch):
    """A folder to stand in, with flags for a small text."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: ["judge", *words, "--data_path", text_file, *FLAGS, "--device=cpu"]


def found_in(path):
    return json.loads(path.read_text())


def test_a_student_is_judged_beside_its_teacher(at, models, tmp_path, text_file, capsys):
    words = at(models("student"), "--teacher", models("teacher"), "--out=scores/a.json")
    assert cli.main(words) == OK
    shown, found = capsys.readouterr().out, found_in(tmp_path / "scores" / "a.json")
    teacher, student = found["table"]
    assert (teacher["name"], student["name"]) == ("teacher", "student")
    assert teacher["kl"] is None and student["kl"] > 0 and 0 < student["acceptance"] < 1
    assert 0 <= student["repetition"] <= 1
    assert len(found["generations"]) == 3
    for title in ("Held-out text", "accepted as a draft", "Results: scores/a.json"):
        assert title in shown


def test_the_text_of_a_run_and_its_teacher_are_those_it_was_trained_with(
    at,
    models,
    text_file,
    tmp_path,
    capsys,
):
    settings = LanguageSettings(
        teacher_model=models("teacher"),
        student_model="fresh:1x16",
        **{"data_path": text_file, "runs_dir": str(tmp_path / "runs"), "run_name": "a"},
        **{"block_size": 24, "batch_size": 4, "max_steps": 2, "eval_rows": 8, "device": "cpu"},
        **{"generations": 0, "max_new_tokens": 6, "learning_rate": 1e-2, "seed": 3},
    )
    path = run(settings)
    expected = json.loads((path / "metrics.json").read_text())["table"]
    for word in ("runs/a", "runs/a/student"):
        (tmp_path / "runs" / "a" / "judged.json").unlink(missing_ok=True)
        assert cli.main(["judge", word, "--generations=2"]) == OK
        found = found_in(path / "judged.json")
        assert found["teacher"] == models("teacher") and len(found["generations"]) == 2
        for row in found["table"]:
            [same] = [other for other in expected if other["name"] == row["name"]]
            for name in ("nll", "ece", "kl", "agreement", "acceptance"):
                near = pytest.approx(same[name], rel=1e-5) if same[name] is not None else None
                assert row[name] == near, name
    assert cli.main(["judge", "runs/a"]) == BAD_INPUT  # nothing is overwritten unasked
    assert "runs/a/judged.json exists: give another file" in capsys.readouterr().err
    alone = ["judge", "runs/a", "--teacher=none", "--generations=0", "--out=runs/a/judged.json"]
    assert cli.main(alone) == OK
    found = found_in(path / "judged.json")
    assert found["teacher"] is None and len(found["table"]) == 1


@pytest.mark.parametrize("kind", [slow("tags"), "mean", slow("prompts")])
def test_several_teachers_are_those_of_the_run(kind, settings, models, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for continuations
    form = "prompt" if kind == "prompts" else "own"
    rows = [{form: e.text, "kind": "aba"[i % 3]} for i, e in enumerate(tiny.texts(60).examples)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = models("teacher"), models("student")
    own = {"on_policy": 1.0} if kind == "prompts" else {"text_field": "own"}
    own["teacher_model"] = ("0.8*{}, 0.2*{}" if kind == "mean" else "a={}, b={}").format(*names)
    own["teacher_field"] = None if kind == "mean" else "kind"
    path = run(settings(**own, data_path="own.jsonl", eval_rows=8))
    assert cli.main(["judge", str(path), "--generations=0"]) == OK
    found, expected = found_in(path / "judged.json"), found_in(path / "metrics.json")["table"]
    assert (found["teacher"], *found["beside"]) == names
    expected = [row for row in expected if row["name"] != "student before"]
    for row, same in zip(found["table"], expected, strict=True):
        for name in ("nll", "kl", "agreement", "acceptance"):
            assert row[name] == (same[name] and pytest.approx(same[name], rel=1e-5)), name
    assert cli.main(["judge", str(path), "--generations=0", "--teacher", names[1], "--out=b"]) == OK


def test_two_tokenizers_are_compared_on_the_same_text(at, models, tmp_path, capsys):
    assert cli.main(at(models("foreign"), "--teacher", models("teacher"))) == OK
    assert "two tokenizers" in capsys.readouterr().out
    found = found_in(tmp_path / "judged.json")
    assert found["same_tokenizer"] is False
    assert [row["kl"] for row in found["table"]] == [None, None]
    assert all(row["bits_per_byte"] > 0 for row in found["table"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--teacher", "x"], "The student comes first, before --teacher"),
        (["x", "--learning_rate", "1"], "--learning_rate has no effect on judging"),
        (["x", "--out=."], "--out is ., a folder; expected a file"),
        (["./nowhere"], "nowhere does not exist: give a run folder or a saved student"),
        (["x"], "x has no config.json"),
        (["begun"], "The run begun has no student yet"),
    ],
)
def test_invalid_arguments_are_one_line(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text('{"mode": "language"}')
    assert cli.main(["judge", *words]) == BAD_INPUT
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert not (tmp_path / "judged.json").exists()


@pytest.fixture
def nothing_loads(monkeypatch):
    """Fail a test in which a model is loaded."""

    def load(*_, **__):
        raise AssertionError("a model was loaded before the checks")

    monkeypatch.setattr("ssl_kd.language.evaluate.judge_finished.load_teacher", load)


@pytest.mark.usefixtures("nothing_loads")
def test_all_faults_are_in_one_message_before_a_model_is_loaded(at, models, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    words = at("empty", "--teacher", f"{models('teacher')},./nowhere")
    capsys.readouterr()  # of a model that the line above has saved
    words[words.index("--data_path") + 1] = "no.jsonl"
    assert cli.main(words) == BAD_INPUT
    first, *faults = capsys.readouterr().err.strip().splitlines()
    assert "3 faults were found, and no model was loaded:" in first
    assert [fault.split(":")[0].strip("- ") for fault in faults] == [
        "DATA_PATH",
        "STUDENT_MODEL",
        "TEACHER_MODEL",
    ]


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out=taken/scores.json"], "OUT is 'taken/scores.json', and .*taken is a file"),
        (["--chat_template_path=chat.jinja"], "chat.jinja"),
        (["--teacher", "teacher,foreign"], "TEACHER_MODEL .* not all of them have the tokenizer"),
    ],
)
def test_bad_files_are_refused_before_a_model_is_loaded(
    at, models, tmp_path, capsys, words, message
):
    (tmp_path / "taken").write_text("")
    named = {name: str(models(name)) for name in ("teacher", "foreign")}
    words = [",".join(str(named.get(x, x)) for x in word.split(",")) for word in words]
    assert cli.main(at(models("student"), *words)) == BAD_INPUT
    assert re.search(message, capsys.readouterr().err)
