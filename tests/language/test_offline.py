"""Offline on-policy distillation: the student's text is frozen, and the teacher scores it once."""

import json
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from ssl_kd.errors import InputError  # noqa: E402
from ssl_kd.language.caching import cache_teacher  # noqa: E402
from ssl_kd.language.prepare import make_distiller, prepare  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.step import precision_of  # noqa: E402
from ssl_kd.settings import SettingsError  # noqa: E402
from ssl_kd.training.clock import no_progress  # noqa: E402
from ssl_kd.training.stop import Interrupted  # noqa: E402
from tests.faults.inject import stop_at  # noqa: E402
from tests.language.test_ranks import assert_near, by, lines  # noqa: E402
from tests.language.test_run import log_lines, table, weights  # noqa: E402
from tests.oracles import token_objectives as oracle  # noqa: E402

SFT = {"teacher_text": 1.0, "alpha_kd": 0.0, "alpha_ce": 1.0}


@pytest.fixture
def settings(settings, models, tmp_path, monkeypatch):
    """Settings of a run on the text of a saved student."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ssl_kd.language.rollouts.PROMPT_TOKENS", 4)
    own = {"student_model": models("student"), "student_text": 0.5, "max_new_tokens": 6}
    return lambda **changes: settings(**own | changes)


def prepared(own) -> Any:
    return prepare(own, precision_of(own), no_progress)


def test_the_students_rows_come_last_and_have_no_cross_entropy(settings):
    own = settings(rollout_temperature=0.0, divergence="reverse_kl", clip_grad=None)
    before, task = prepared(settings(student_text=0.0, packing=False)), prepared(own)
    is_own = task.blocks.by_student
    assert torch.equal(is_own, (before.blocks.ids != task.blocks.ids).any(1))
    assert int(is_own.sum()) == round(0.5 * len(is_own)) and task.digest != before.digest
    batch = task.blocks.batch([3, 1, 4, 2, 6])
    text = [row for row in (3, 1, 4, 2, 6) if not is_own[row]]
    assert 0 < batch.written < 5 and batch.rows[: len(text)].tolist() == text
    assert torch.equal(task.blocks.batch(batch.rows).input_ids, batch.input_ids)  # of a replay
    row = len(text)
    ids, new = batch.input_ids[row], batch.counts[row]
    with torch.no_grad():
        likeliest = task.student.model(ids[None]).logits[0].argmax(-1)
    assert torch.equal(likeliest[:-1][new[1:]], ids[1:][new[1:]]) and not new[:4].any()

    distiller = make_distiller(task)
    models = distiller.student, task.frozen.model
    _, ce, kd, n = oracle.step(*models, batch, distiller.settings, len(text))
    result = distiller.step([batch], 1e-3)
    assert result.updated and result.tokens == n and result.kd == pytest.approx(kd, rel=1e-4)
    assert result.ce == pytest.approx(ce * n / batch.text_tokens, rel=1e-4)


@pytest.mark.parametrize(("method", "divergence"), [("topk:320", "reverse_kl"), ("hidden", "js")])
def test_the_teacher_scores_the_students_text_once_and_never_in_training(
    settings, tmp_path, method, divergence
):
    own = settings(student_text=1.0, cache_method=method, divergence=divergence, temperature=1.0)
    live = run(own.replace(run_name="live"))
    cached = own.replace(teacher_cache=str(tmp_path / "cache"))
    cache = cache_teacher(cached)
    (texts,) = (tmp_path / "data" / "student_text").iterdir()  # the same for both
    assert cache.manifest["statistics"]["tokens"] == int(prepared(own).blocks.counts.sum())
    assert prepared(cached).frozen is None
    path = run(cached)
    for a, b in zip(log_lines(live), log_lines(path), strict=True):
        assert "kd" not in a or (a["ce"] is None and a["kd"] == pytest.approx(b["kd"], rel=1e-3))
    assert table(path)["student"]["nll"] == pytest.approx(table(live)["student"]["nll"], rel=1e-3)
    assert json.loads((path / "metrics.json").read_text())["best_step"] == 6  # the last

    with pytest.raises(Interrupted):
        run(cached.replace(run_name="b"), progress=stop_at(4))
    again = run(cached.replace(run_name="b", resume=True))
    assert log_lines(again) == log_lines(path) and weights(again) == weights(path)


def test_two_ranks_learn_from_it_what_one_process_learns(settings):
    one, two = (by(n, settings(run_name=str(n), student_text=0.5)) for n in (1, 2))
    assert_near(one, two, 1e-5)
    assert not lines(two, "events.jsonl")


def test_another_teacher_than_that_of_the_answers_is_refused_by_name(settings, models, tmp_path):
    sft = run(settings(**SFT, student_text=0.0)) / "student"
    own = settings(student_model=str(sft), run_name="b", teacher_cache=str(tmp_path / "c"))
    own = own.replace(cache_method="topk:320", lora_rank=2)
    cache_teacher(own)
    path = run(own) / "student"
    record = json.loads((path / "text_teacher.json").read_text())
    assert record["name"] == models("teacher") and (sft / "text_teacher.json").exists()
    other = own.replace(teacher_model=models("student"), student_model=str(path), run_name="c")
    for work in (cache_teacher, run):
        with pytest.raises(
            SettingsError, match=f"learned from text by the teacher {models('teacher')}"
        ):
            work(other)
    prepared(other.replace(student_text=0.0, teacher_cache=None))  # live is another matter
    (path / "text_teacher.json").write_text("{}")
    with pytest.raises(InputError, match=r"text_teacher.json is damaged"):
        run(other)


@pytest.mark.parametrize(("changes", "message"), [
    ({"on_policy": 0.5}, "STUDENT_TEXT cannot be combined with other generated text"),
    ({"alpha_kd": 0.0}, "and for STUDENT_TEXT set ALPHA_KD above 0"),
    ({"teacher_model": "none"}, "STUDENT_TEXT is above 0, which needs a teacher"),
    ({"align": "chunks"}, "STUDENT_TEXT is above 0, but ALIGN is 'chunks'"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_together_is_refused(settings, changes, message):
    with pytest.raises(SettingsError, match=message):
        settings(**changes)
