"""Students that learn from their own text: offline on-policy, and self-distillation."""

import copy
import json
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from ssl_kd.core.runs.clock import no_progress  # noqa: E402
from ssl_kd.core.runs.stop import Interrupted  # noqa: E402
from ssl_kd.core.settings import SettingsError  # noqa: E402
from ssl_kd.language.losses.teacher_output import logits_of  # noqa: E402
from ssl_kd.language.losses.token_distillation import next_token_targets  # noqa: E402
from ssl_kd.language.models.causal import CausalLM  # noqa: E402
from ssl_kd.language.prepare import make_distiller, prepare  # noqa: E402
from ssl_kd.language.rollouts import rollout_batches  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.teachers.caching import cache_teacher  # noqa: E402
from ssl_kd.language.teachers.self_teacher import SelfTeacher, with_own_prompts  # noqa: E402
from ssl_kd.language.text.dataset import TextDataset  # noqa: E402
from ssl_kd.language.text.records import as_example  # noqa: E402
from ssl_kd.language.train.step import precision_of  # noqa: E402
from tests.faults.inject import stop_at  # noqa: E402
from tests.language.test_ranks import assert_near, by  # noqa: E402
from tests.language.test_run import log_lines, weights  # noqa: E402
from tests.marks import slow  # noqa: E402
from tests.oracles import token_objectives as oracle  # noqa: E402
from tests.tiny import sentence  # noqa: E402


@pytest.fixture
def settings(settings, models, tmp_path, monkeypatch):
    """Settings of a run on the text of a saved student."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ssl_kd.language.rollouts.PROMPT_TOKENS", 4)
    own = {"student_model": models("student"), "student_text": 0.5, "max_new_tokens": 6}
    return lambda **changes: settings(**own | changes)


@pytest.fixture
def on_self(settings, tmp_path):
    """Settings of a run on prompts and answers of different lengths, without another teacher."""
    rows = [{"prompt": sentence(i) * (1 + i % 2), "completion": sentence(i + 1)} for i in range(60)]
    for i, row in enumerate(rows):
        row["privileged_context"] = "a bird" * (i % 3 > 0)  # otherwise the completion
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {"data_path": "records.jsonl", "teacher_model": "self", "block_size": 64}
    own["teacher_prompt_template"] = "{prompt}{privileged_context} again. "
    return lambda **changes: settings(**own | {"student_text": 0.0, "on_policy": 0.5} | changes)


def prepared(own) -> Any:
    return prepare(own, precision_of(own), no_progress)


def test_the_students_rows_come_last_and_have_no_cross_entropy(settings):
    own = settings(divergence="reverse_kl")
    before, task = prepared(settings(student_text=0.0, packing=False)), prepared(own)
    is_own = task.blocks.by_student
    assert torch.equal(is_own, (before.blocks.ids != task.blocks.ids).any(1))
    batch = task.blocks.batch([3, 1, 4, 2, 6])
    text = [row for row in (3, 1, 4, 2, 6) if not is_own[row]]
    assert 0 < batch.written < 5 and batch.rows[: len(text)].tolist() == text
    distiller = make_distiller(task)
    _, ce, kd, n = oracle.step(
        distiller.student, task.teacher.frozen[0].model, batch, own, len(text)
    )
    result = distiller.step([batch], 1e-3)
    assert result.updated and result.tokens == n and result.kd == pytest.approx(kd, rel=1e-4)
    assert result.ce == pytest.approx(ce * n / batch.text_tokens, rel=1e-4)


@pytest.mark.parametrize(
    ("method", "divergence"), [slow("topk:320", "reverse_kl"), ("hidden", "js")]
)
def test_the_teacher_scores_the_students_text_once(settings, method, divergence):
    own = settings(student_text=1.0, cache_method=method, divergence=divergence, temperature=1.0)
    live = run(own.replace(run_name="live"))
    cached = own.replace(teacher_cache="auto")
    cache = cache_teacher(cached)
    assert cache.folder.parent.name == "teacher_caches"
    path = run(cached)
    for a, b in zip(log_lines(live), log_lines(path), strict=True):
        assert "kd" not in a or (a["ce"] is None and a["kd"] == pytest.approx(b["kd"], rel=1e-3))


def test_another_teacher_than_that_of_the_answers_is_refused_by_name(settings, models):
    sft = run(settings(teacher_text=1.0, student_text=0.0, alpha_kd=0.0)) / "student"
    own = settings(student_model=str(sft), run_name="b", teacher_cache="c", lora_rank=2)
    cache_teacher(own)
    path = run(own) / "student"
    other = own.replace(teacher_model=models("student"), student_model=str(path), run_name="c")
    with pytest.raises(SettingsError, match=f"text by the teacher {models('teacher')}"):
        cache_teacher(other)


def test_prompts_alone_are_continued_by_the_student_and_cached(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("ssl_kd.language.rollouts.PART", 2)  # so that some stay without a text
    lines = [json.dumps({"prompt": sentence(i)}) for i in range(80)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    own = settings(student_text=1.0, data_path="prompts.jsonl", teacher_cache="c", max_steps=1)
    cache_teacher(own)
    task = prepared(own)
    assert int(task.blocks.by_student.sum()) == 4 < len(task.blocks)
    assert task.teacher.cache.manifest["statistics"]["tokens"] == int(task.blocks.counts.sum()) > 0
    assert log_lines(run(own))[0]["kd"] is not None
    before = cache_teacher(own.replace(teacher_cache="auto")).folder
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines[:70]))
    assert cache_teacher(own.replace(teacher_cache="auto")).folder != before


@pytest.mark.parametrize("kind", ["offline", slow("self")])
def test_an_interrupted_run_ends_with_the_same_bits(settings, on_self, kind):
    own = on_self() if kind == "self" else settings()
    whole = run(own.replace(run_name="whole"))
    with pytest.raises(Interrupted):
        run(own, progress=stop_at(4))
    path = run(own.replace(resume=True))
    assert log_lines(path) == log_lines(whole) and weights(path) == weights(whole)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_the_teacher_is_the_same_model_behind_another_prompt(on_self, tiny, lora_rank):
    task = prepared(on_self(lora_rank=lora_rank))
    distiller = make_distiller(task)
    rollouts = rollout_batches(distiller, task.blocks, tiny.tokenizer)
    (batch,), _ = rollouts.batches(0, [torch.arange(8)], torch.device("cpu"))
    assert 0 < batch.written < 8 and distiller.step([batch], 1e-2).updated  # adapters are not 0
    source: Any = distiller.teacher
    model: Any = distiller.student
    at = 0
    rows, _ = next_token_targets(batch.input_ids, batch.counts)
    found = logits_of(source.answer_once(batch, rows))
    for i, row in enumerate(batch.rows.tolist()):
        (first, prompt), n = task.blocks.own_prompts[row], int((batch.documents[i] > 0).sum())
        one = task.train_set.examples[row]
        assert f"{one.privileged_context or one.completion} again." in tiny.tokenizer.decode(prompt)
        with torch.no_grad(), (model.disable_adapter if lora_rank else torch.no_grad)():
            logits = model(torch.cat([prompt, batch.input_ids[i, first:n]])[None]).logits[0]
        wanted = logits[len(prompt) - 1 : -1][batch.counts[i, first:n]]
        torch.testing.assert_close(found[at : at + len(wanted)], wanted, rtol=1e-4, atol=1e-4)
        at += len(wanted)
    assert at == len(found)
    whole = [n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n]
    assert source.student is model and bool(whole) == (lora_rank == 0)


def test_in_a_chat_the_users_turn_before_the_answer_changes(tiny):
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    ask, say = ({"role": role, "content": role[0]} for role in ("user", "assistant"))
    records: list[Any] = [
        {"messages": [ask, say, {"role": "user", "content": "more"}, say]},
        {"prompt": [ask, say, {"role": "user", "content": "more"}], "completion": [say]},
        {"prompt": [ask], "privileged_context": "{prompt}"},
    ]
    examples = [as_example(r, str(i), prompts=True) for i, r in enumerate(records)]
    texts: Any = TextDataset("chats", "train", examples, "", ())
    lm = CausalLM(tiny.model(), tokenizer, "", "")
    blocks = with_own_prompts(texts, lm, 96, "{prompt} [{privileged_context}]")
    prompts = blocks.own_prompts
    assert [tokenizer.decode(prompt) for _, prompt in prompts] == [
        "<user>u [a]\n<assistant>",
        "<user>u\n<assistant>a\n<user>more [a]\n<assistant>",
        "<user>u [{prompt}]\n<assistant>",
    ]
    assert tokenizer.decode(blocks.ids[0, : prompts[0][0]]) == "<user>u\n<assistant>"
    assert blocks.turns["there"] == 3


@pytest.mark.slow
def test_two_ranks_teach_themselves_what_one_process_does(on_self):
    one, two = (by(n, on_self(run_name=str(n), lora_rank=2)) for n in (1, 2))
    assert_near(one, two, 1e-5)


def test_a_fault_behind_the_teachers_prompt_alone_is_named(on_self, tiny):
    task = prepared(on_self(teacher_prompt_template="{prompt}{privileged_context}%"))
    distiller, sign = make_distiller(task), tiny.tokenizer("%").input_ids[-1]
    student: Any = distiller.student
    assert not (task.blocks.ids == sign).any()
    with torch.no_grad():
        student.get_input_embeddings().weight[sign] = torch.nan
    distiller.step([task.blocks.batch([0, 1])], 1e-3)
    (event,) = (e for e in distiller.guard.events.events if e.action == "explained")
    assert event.part == "kd" and "student weight model.embed_tokens.weight" in event.reason


def test_without_anything_privileged_there_is_nothing_to_learn(on_self, tiny):
    task = prepared(on_self())
    blocks = with_own_prompts(task.train_set, task.student, 64, "{prompt}")
    model, batch = task.student.model, blocks.batch(range(6))
    source: Any = SelfTeacher(model, blocks.own_prompts)
    half = tiny.half(torch.bfloat16)
    distiller = tiny.distiller(None, model, half, source, alpha_ce=0.0, alpha_kd=1.0)
    rows, _ = next_token_targets(batch.input_ids, batch.counts)
    with distiller.precision.autocast():
        assert torch.equal(
            source.answer_once(batch, rows).hidden, distiller._forward(batch).at(rows).x
        )
    (kd := distiller.terms(batch)["kd"]).backward()  # the two heads round differently
    assert abs(kd) < 1e-8 and all(p.grad.abs().max() < 1e-4 for p in model.parameters())
