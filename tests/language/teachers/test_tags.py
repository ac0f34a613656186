"""Each row is learned from the teacher of its tag."""

import json
import math
from pathlib import Path

import pytest
import torch

from ssl_kd.core.runs.stop import Interrupted
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.evaluate.judge_in_run import make_judge
from ssl_kd.language.prepare import make_distiller
from ssl_kd.language.rollouts import rollout_batches
from ssl_kd.language.run import run
from tests.faults.inject import stop_at
from tests.language.test_prompts import prepared
from tests.language.test_ranks import assert_near, by
from tests.language.test_run import weights


@pytest.fixture
def tagged(settings, models, tiny, tmp_path):
    texts = [example.text for example in tiny.texts(60).examples]
    records = [{"text": text, "kind": ("a", "b", "b")[i % 3]} for i, text in enumerate(texts)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    own = {"data_path": str(tmp_path / "own.jsonl"), "teacher_field": "kind", "block_size": 64}
    own["teacher_model"] = f"a={models('teacher')}, b={models('student')}"
    return lambda **changes: settings(**own | changes)


@pytest.mark.parametrize("changes", [{}, {"on_policy": 0.5, "max_new_tokens": 6}])
@torch.no_grad()
def test_a_row_is_learned_from_the_teacher_of_its_tag(tagged, changes):
    task = prepared(tagged(temperature=1.0, alpha_ce=0.5, **changes))
    distiller, blocks = make_distiller(task), task.student_blocks
    teachers, rows = task.teacher.frozen, torch.arange(6)
    (batch,), tags = [blocks.batch(rows)], blocks.tags
    if changes:
        written = rollout_batches(distiller, blocks, task.student.tokenizer)
        (batch,), _ = written.batches(0, [rows], torch.device("cpu"))
        assert 0 < batch.written < 6
    expected, owners = 0.0, tags[batch.rows].tolist()
    for i, teacher in enumerate(owners):
        inputs = {n: getattr(batch, n)[i : i + 1] for n in ("input_ids", "position_ids")}
        p, q = (
            model(**inputs, use_cache=False).logits[0].log_softmax(-1).double()
            for model in (teachers[teacher].model, distiller.student)
        )
        expected += float((p.exp() * (p - q)).sum(-1)[:-1][batch.counts[i, 1:]].sum())
    assert {*owners} == {0, 1}
    assert float(distiller.terms(batch)["kd"]) == pytest.approx(expected, rel=1e-5)
    alone = blocks.batch((tags == 1).nonzero().flatten()[:2])
    vars(distiller.teacher)["answers"] = (None, teachers[1])  # the first is not run
    assert distiller.terms(alone)["kd"] > 0


@pytest.mark.parametrize("form", ["text", "prompt"])
@torch.no_grad()
def test_a_held_out_row_is_compared_with_the_teacher_of_its_tag(tagged, form, monkeypatch):
    path, held_out = (Path(tagged().data_path).with_name(name) for name in ("own.jsonl", "b.jsonl"))
    monkeypatch.chdir(path.parent)  # for continuations
    lines = path.read_text().replace("text", form).splitlines(keepends=True)
    path.write_text("".join(lines[20:]))
    held_out.write_text("".join(lines[:20]))
    own = {"on_policy": 1.0, "rollout_temperature": 0.0, "batch_size": 3}
    task = prepared(tagged(**own, packing=False, eval_path=str(held_out)))
    models = (task.student.model, task.teacher.frozen[0].model, task.teacher.frozen[1].model)
    for blocks in (task.eval_blocks, task.validation_blocks):
        expected, likelihoods = [], []
        for tag, ids, counts in zip(blocks.tags, blocks.ids, blocks.counts, strict=True):
            q, *teachers = (m(ids[None]).logits[0, :-1].log_softmax(-1) for m in models)
            at, p = counts[1:], teachers[tag].double()
            expected.append((p.exp() * (p - q)).sum(-1)[at])
            assert form == "text" or torch.equal(p.argmax(-1)[at], ids[counts])
            likelihoods.append(torch.stack([each[at, ids[counts]] for each in teachers]))
        first, second = torch.cat(likelihoods, 1).mean(1).neg().exp().tolist()  # perplexities
        assert {*blocks.tags.tolist()} == {0, 1} and abs(first - second) > 1
        scores = make_judge(task)._scores(models[0], blocks)
        assert scores.kl == pytest.approx(float(torch.cat(expected).mean()), rel=1e-5)


def test_packing_keeps_tags_apart(tagged):
    blocks = prepared(tagged()).student_blocks
    plain = prepared(tagged(packing=False)).student_blocks
    columns = zip(plain.ids, plain.documents, plain.tags, strict=True)
    kind = {tuple(ids[documents > 0].tolist()): tag for ids, documents, tag in columns}
    assert blocks.packed
    for ids, documents, tag in zip(blocks.ids, blocks.documents, blocks.tags, strict=True):
        for number in range(1, int(documents.max()) + 1):
            assert kind[tuple(ids[documents == number].tolist())] == tag


def test_a_faulty_teacher_is_cut_out_of_its_rows_only_and_named(tagged):
    task = prepared(tagged())
    distiller, tags = make_distiller(task), task.student_blocks.tags[:6].tolist()
    with torch.no_grad():
        task.teacher.lms[1].model.model.layers[0].mlp.up_proj.weight[3, 2] = math.nan
    assert distiller.step([task.student_blocks.batch(range(6))], 1e-3).learned("kd")
    reasons = {e.action: e.reason for e in distiller.guard.events.events}
    sick = [row for row in range(6) if tags[row] == 1]
    assert reasons["rows left out"] == f"not finite in rows {str(sick)[1:-1]}"
    assert f"teacher {task.teacher.lms[1].name} weight" in reasons["explained"]


def test_a_tagged_run_resumes_with_the_same_bits(tagged):
    whole = run(tagged(run_name="whole", log_every=3))
    with pytest.raises(Interrupted):
        run(tagged(log_every=3), progress=stop_at(3))
    assert weights(run(tagged(log_every=3, resume=True))) == weights(whole)


@pytest.mark.slow
def test_two_ranks_learn_from_tagged_teachers_what_one_process_learns(tagged):
    one, two = (by(world, tagged(run_name=f"{world}", alpha_ce=0.0)) for world in (1, 2))
    assert_near(one, two)


def test_wrong_tags_are_named(tagged):
    with pytest.raises(SettingsError, match="own.jsonl:1: the field text is .*; expected a tag"):
        prepared(tagged(teacher_field="text"))
    untagged = Path(tagged().data_path).with_name("held_out.jsonl")
    untagged.write_text(json.dumps({"text": "a text without a tag"}))
    with pytest.raises(SettingsError, match="held_out.jsonl:1: the field kind is 'None'"):
        prepared(tagged(eval_path=str(untagged)))
    with pytest.raises(SettingsError, match="TEACHER_FIELD is None: set it to the field"):
        tagged(teacher_field=None)
    for teachers in ("A, B", "a=A, a=B", "a=A", "0.5*a=A, 0.5*b=B"):
        with pytest.raises(SettingsError, match="each with its own tag and no weight"):
            tagged(teacher_model=teachers)
