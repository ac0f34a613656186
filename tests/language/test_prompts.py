"""Runs on prompts without a text, which the student or the teacher continues."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from ssl_kd.errors import InputError  # noqa: E402
from ssl_kd.language.judge_finished import judge  # noqa: E402
from ssl_kd.language.prepare import prepare  # noqa: E402
from ssl_kd.language.rollouts import rollout_batches, with_held_out_text  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.step import precision_of  # noqa: E402
from ssl_kd.language.teachers import ONE_RANK  # noqa: E402
from ssl_kd.settings import SettingsError  # noqa: E402
from ssl_kd.teachers.frozen import FrozenTeacher  # noqa: E402
from ssl_kd.training.stop import Interrupted  # noqa: E402
from tests.faults.inject import stop_at  # noqa: E402
from tests.language.test_run import table, weights  # noqa: E402

CPU = torch.device("cpu")
ON_POLICY = {"on_policy": 1.0, "alpha_ce": 0.0, "rollout_temperature": 0.0}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def prompts(tiny, tmp_path):
    """A file of prompts, of which every fifth has a completion."""
    path = tmp_path / "prompts.jsonl"
    words = [f"{i} {e.text}".split(" ") for i, e in enumerate(tiny.texts(60).examples)]
    records = [{"prompt": " ".join(w[:4]), "completion": " ".join(w[4:9])} for w in words]
    for record in (r for i, r in enumerate(records) if i % 5):
        del record["completion"]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def prepared(settings):
    return prepare(settings, precision_of(settings), lambda *_: None)


def test_prompts_are_continued_and_the_teacher_continues_the_held_out_ones(settings, prompts):
    task = prepared(settings(data_path=prompts, **ON_POLICY))
    length = int((task.blocks.documents[1] > 0).sum())
    prompt = task.blocks.ids[1, :length]
    assert not task.blocks.counts[1].any() and not task.blocks.packed
    assert task.student.tokenizer.eos_token_id not in prompt  # nothing ends a prompt
    held_out = task.eval_blocks
    assert held_out.counts.any(1).all() and len(held_out) >= 4
    for row in range(len(held_out)):  # of a completion, the text itself
        at = int(held_out.counts[row].int().argmax())
        ids = held_out.ids[row][held_out.documents[row] > 0]
        with torch.no_grad():
            said = task.frozen.model(ids[None]).logits[0, at - 1 : -1].argmax(-1)
        alone = task.eval_set.examples[row].is_prompt
        assert not alone or torch.equal(said, ids[at:])
    path = run(settings(data_path=prompts, **ON_POLICY))
    metrics = json.loads((path / "metrics.json").read_text())
    assert metrics["success_rate"] == 1.0 and metrics["learned_from"] == {"kd": 6}
    saved = settings(data_path=prompts, student_model=str(path / "student"), **ON_POLICY)
    assert judge(saved)["table"][0]["perplexity"] == metrics["table"][0]["perplexity"]


def test_prompts_need_a_model_that_continues_every_row(settings, prompts, tiny, tmp_path):
    only = tmp_path / "only.jsonl"
    only.write_text('{"prompt": "the old fox"}\n')
    for changes in ({}, {"on_policy": 0.5}, {"on_policy": 1.0, "divergence": "distillm2"}):
        with pytest.raises(InputError, match="--on_policy 1 or --teacher_text 1 lets a model"):
            run(settings(data_path=str(only), **changes))
    task = prepared(settings(data_path=prompts, teacher_text=1.0))
    assert task.blocks.counts.any(1).all()  # in the order of training, the first file holds all
    blocks = tiny.blocks()
    alone = replace(blocks, counts=torch.zeros_like(blocks.counts))
    with pytest.raises(SettingsError, match="95 of 95 held-out rows .* only a local teacher"):
        with_held_out_text(settings(), alone, None, None, ONE_RANK, lambda *_: None)


def test_a_run_on_prompts_resumes_with_the_same_bits(settings, prompts):
    options = {"data_path": prompts, "num_generations": 2, "log_every": 3, "on_policy": 1.0}
    whole = run(settings(**options, run_name="whole"))
    with pytest.raises(Interrupted):
        run(settings(**options), progress=stop_at(3))
    path = run(settings(**options, resume=True))
    assert weights(path) == weights(whole) and table(path) == table(whole)


def test_each_row_has_num_generations_continuations_that_depend_only_on_step_and_row(tiny):
    teacher = FrozenTeacher(tiny.model(spread=0.3))
    blocks = tiny.blocks()

    def batches(rows, **changes):
        options = {"on_policy": 1.0, "max_new_tokens": 6, **changes}
        student = tiny.model(seed=3, spread=0.3)
        distiller = tiny.distiller(teacher, student, **options)
        written = rollout_batches(distiller, blocks, tiny.tokenizer)
        return distiller, *written.batches(2, rows, CPU)

    distiller, (batch,), sums = batches([torch.tensor([4, 1])], num_generations=3)
    assert batch.rows.tolist() == [4, 4, 4, 1, 1, 1] and batch.written == 6 == sums["written"]
    assert sums["rows"] == 6 and sums["tokens"] == int(batch.counts.sum())
    texts = [batch.input_ids[i][batch.counts[i]].tolist() for i in range(6)]
    assert len({*map(tuple, texts[:3])}) == 3
    _, (single,), _ = batches([torch.tensor([1])], num_generations=2)
    assert [single.input_ids[i][single.counts[i]].tolist() for i in range(2)] == texts[3:5]
    _, (plain,), _ = batches([torch.tensor([1])])  # the first is that of a single one
    assert plain.input_ids[0][plain.counts[0]].tolist() == texts[3]
    assert distiller.step([batch], 1e-3).learned("kd")
