"""`ssl_kd.Distillation`: the language mode from Python."""

import json
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import ssl_kd  # noqa: E402
from ssl_kd.core.errors import InputError  # noqa: E402
from ssl_kd.core.runs.folder import RunFinished  # noqa: E402
from ssl_kd.distillation import DistilledRun  # noqa: E402
from ssl_kd.language.models.causal import load_causal_lm  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.settings import LanguageSettings  # noqa: E402
from ssl_kd.language.train.replay import replay  # noqa: E402
from tests.language.conftest import FAST  # noqa: E402
from tests.tiny import sentence  # noqa: E402

TEXTS = [sentence(i) for i in range(60)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def teacher(tiny, tmp_path):
    return str(tiny.folder(tmp_path / "teacher"))


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_from_python_is_that_of_the_same_settings(here, teacher):
    made = ssl_kd.Distillation(teacher, "fresh:1x16", TEXTS, **FAST)
    stages = []
    done = made.run(progress=lambda stage, *_: stages.append(stage))
    assert {"prepare", "judge", "train", "report"} <= set(stages)
    again = run(LanguageSettings.from_dict(made.settings.to_dict()))
    assert equal(weights(done.student), weights(load_causal_lm(again / "student").model))
    assert done.report.is_file() and done.tokenizer.decode(done.tokenizer("a").input_ids).endswith(
        "a"
    )
    rows = {row["name"]: row for row in done.metrics["table"]}
    assert done.scores["perplexity"] == {name: rows[name]["perplexity"] for name in rows}
    assert [row["step"] for row in done.history if "train_loss" in row] == [2, 4, 6]
    assert repr(done) == f"DistilledRun('{done.path}')"
    shown = done._repr_mimebundle_()
    assert "perplexity" in shown["text/html"] and "student before" in shown["text/plain"]
    assert DistilledRun(done.path).metrics == done.metrics


def test_models_in_memory_are_used_unchanged(here, teacher, tiny):
    named = ssl_kd.Distillation(teacher, teacher, TEXTS, run_name="named", **FAST).run()
    lm, own = load_causal_lm(teacher), load_causal_lm(teacher)
    before = weights(own.model)
    pairs = (lm.model, lm.tokenizer), (own.model, own.tokenizer)
    given = ssl_kd.Distillation(*pairs, TEXTS, run_name="given", **FAST)
    done = given.run()
    assert equal(weights(done.student), weights(named.student))
    assert not equal(before, weights(own.model))  # trained in place
    config = json.loads((done.path / "config.json").read_text())
    assert config["teacher"]["name"] == "LlamaForCausalLM in memory"
    with pytest.raises(RunFinished):
        given.resume()
    with pytest.raises(InputError, match="TEACHER_MODEL is 'given': .* in memory"):
        run(given.settings.replace(run_name="b"))


def test_an_interrupted_run_resumes_with_the_models_in_memory(here, teacher):
    lm = load_causal_lm(teacher)
    settings = {**FAST, "run_name": "a"}

    def made():
        own = load_causal_lm(teacher)
        return ssl_kd.Distillation(
            (lm.model, lm.tokenizer), (own.model, own.tokenizer), TEXTS, **settings
        )

    class Cut(Exception):
        pass

    def cut(stage, done, *_):
        if stage == "train" and done == 4:
            raise Cut

    with pytest.raises(Cut):
        made().run(progress=cut)
    resumed = made().resume()
    settings["run_name"] = "whole"
    assert equal(weights(resumed.student), weights(made().run().student))


def test_replay_of_a_model_in_memory_explains_its_limits(here, teacher, monkeypatch):
    lm = load_causal_lm(teacher)
    own = load_causal_lm(teacher)
    plain = type(lm.model.model.norm).forward
    calls = []

    def sick(self, x):
        if self is own.model.model.norm and self.training:
            calls.append(1)
            return plain(self, x) * (float("nan") if len(calls) == 2 else 1)
        return plain(self, x)

    monkeypatch.setattr(type(lm.model.model.norm), "forward", sick)
    pairs = (lm.model, lm.tokenizer), (own.model, own.tokenizer)
    done = ssl_kd.Distillation(*pairs, TEXTS, **FAST).run()
    (bundle, *_) = sorted((done.path / "faults").glob("*.safetensors"))
    with pytest.raises(InputError, match="was a model in memory"):
        replay(bundle)


RECORDS = [{"prompt": f"{i}: ", "completion": sentence(i)} for i in range(40)]


def test_texts_in_memory_are_kept_by_their_content(here):
    made = ssl_kd.Distillation("none", texts=TEXTS, alpha_kd=0, eval_texts=iter(TEXTS[:5]))
    path = here / made.settings.data_path
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == TEXTS
    assert ssl_kd.Distillation(texts=tuple(TEXTS)).settings.data_path == made.settings.data_path
    assert made.settings.eval_path not in (None, made.settings.data_path)
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".jsonl", ".jsonl"]
    datasets = pytest.importorskip("datasets")
    of_set = ssl_kd.Distillation(texts=datasets.Dataset.from_list(RECORDS))
    assert of_set.settings.data_path == ssl_kd.Distillation(texts=RECORDS).settings.data_path
    pandas = pytest.importorskip("pandas")
    of_frame = ssl_kd.Distillation(texts=pandas.DataFrame(RECORDS))
    assert of_frame.settings.data_path == of_set.settings.data_path


@pytest.mark.parametrize(
    "texts, words",
    [
        ([], "texts is empty"),
        ([" a", 3], r"texts\[1\] is of type int; expected a string or a record"),
        ([{"text": {1}}], r"texts\[0\] cannot be written as JSON: .* set"),
        ({"train": ["a"]}, "texts is of type dict; .*have a mapping of splits"),
        (3, "texts is of type int"),
    ],
)
def test_other_texts_are_refused_and_nothing_is_written(here, texts, words):
    with pytest.raises(InputError, match=words):
        ssl_kd.Distillation(texts=texts)
    assert not list(here.rglob("*"))


@pytest.mark.parametrize(
    "given, words",
    [
        ({"temprature": 2.0}, "(?i)temprature.* Did you mean temperature"),
        ({"temperature": -1}, "^temperature is -1"),
        ({"teacher_model": "gpt2"}, "teacher_model is not accepted here: use the argument teacher"),
        ({"preset": "stabel"}, "preset is 'stabel'; expected one of .* Did you mean stable"),
        ({"teacher": 3}, "teacher is of type int; expected a folder"),
        ({"student": ("a", "b")}, "student is of type tuple"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_written(here, given, words):
    with pytest.raises(InputError, match=words):
        ssl_kd.Distillation(texts=["a"], **given)
    assert not list(here.rglob("*"))


def test_arguments_override_a_preset_and_rows_per_device_count_for_each_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    rows: dict[str, Any] = {"per_device_train_batch_size": 2}
    settings = ssl_kd.Distillation(preset="stable", temperature=3.0, **rows).settings
    assert (settings.temperature, settings.alpha_kd, settings.batch_size) == (3.0, 0.1, 16)


def test_a_folder_without_a_run_is_refused(here):
    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        DistilledRun(here)
