"""Runs on prompts without an answer, which a model continues, and on chats with a template."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from ssl_kd.core.errors import InputError  # noqa: E402
from ssl_kd.core.settings import SettingsError  # noqa: E402
from ssl_kd.language.evaluate.judge_finished import judge  # noqa: E402
from ssl_kd.language.models.causal import load_tokenizer  # noqa: E402
from ssl_kd.language.prepare import prepare  # noqa: E402
from ssl_kd.language.rollouts import with_held_out_text  # noqa: E402
from ssl_kd.language.run import run  # noqa: E402
from ssl_kd.language.teachers.load import ONE_RANK  # noqa: E402
from ssl_kd.language.train.step import precision_of  # noqa: E402
from tests.language.test_run import table  # noqa: E402


@pytest.fixture
def save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(records):
        (tmp_path / "own.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
        return {"data_path": str(tmp_path / "own.jsonl"), "on_policy": 1.0, "alpha_ce": 0.0}

    return write


@pytest.fixture
def prompts(tiny, save):  # every fifth has a completion
    words = [f"{i} {e.text}".split(" ") for i, e in enumerate(tiny.texts(60).examples)]
    ends = [{} if i % 5 else {"completion": " ".join(w[4:9])} for i, w in enumerate(words)]
    return save([{"prompt": " ".join(w[:4])} | end for w, end in zip(words, ends, strict=True)])


def prepared(settings):
    return prepare(settings, precision_of(settings), lambda *_: None)


def test_the_student_continues_prompts_and_the_teacher_the_held_out_ones(settings, prompts):
    task = prepared(settings(**prompts, rollout_temperature=0.0))
    rows, held_out = task.student_blocks, task.eval_blocks
    assert not rows.counts[1].any() and 1 not in rows.ids[1][rows.documents[1] > 0]
    assert not rows.packed and sum(e.is_prompt for e in task.eval_set.examples) > 2
    for row, example in enumerate(task.eval_set.examples):
        ids = held_out.ids[row][held_out.documents[row] > 0]
        at = int(held_out.counts[row].int().argmax())
        with torch.no_grad():
            likeliest = task.teacher.frozen[0].model(ids[None]).logits[0, at - 1 : -1].argmax(-1)
        assert torch.equal(likeliest, ids[at:]) or not example.is_prompt
    by_teacher = settings(**prompts | {"on_policy": 0.0, "alpha_ce": 0.5}, teacher_text=1.0)
    assert prepared(by_teacher).student_blocks.counts.any(1).all()
    own, alone = settings(), replace(held_out, counts=held_out.counts & False)
    with pytest.raises(SettingsError, match=r"\d+ of \d+ held-out rows .* only a local teacher"):
        with_held_out_text(own, alone, [], precision_of(own), ONE_RANK, lambda *_: None)


def test_a_run_on_prompts_is_judged_again_on_the_same_text(settings, prompts, save):
    path = run(settings(**prompts))
    scores = judge(settings(**prompts, student_model=str(path / "student")))["table"]
    assert scores[0]["perplexity"] == table(path)["teacher"]["perplexity"]
    for changes in ({"on_policy": 0.5}, {"divergence": "distillm2"}):
        with pytest.raises(InputError, match="--on_policy 1 or --teacher_text 1 lets a model"):
            prepared(settings(**save([{"prompt": "the old fox"}]) | changes))


def test_the_chosen_template_is_used_everywhere_and_saved(settings, save, tmp_path):
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ '!' if x }}</s>{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}"
    )
    user, bot = ({"role": role, "content": role[0]} for role in ("user", "assistant"))
    chats = [[{**user, "content": f"{i}?"}, bot] for i in range(40)]
    data = save([{"messages": chat} for chat in chats]) | {"on_policy": 0.0}
    own = settings(**data, chat_template_path="own.jinja", chat_template_kwargs={"x": True})
    path = run(own)
    saved = load_tokenizer(path / "student")
    assert saved.apply_chat_template(chats[0], tokenize=False) == "<user>0?!</s><assistant>a!</s>"
    assert "!" not in saved.apply_chat_template(chats[0], tokenize=False, x=False)
    generations = json.loads((path / "metrics.json").read_text())["generations"]
    assert generations[0]["prompt"].endswith("?!</s><assistant>")
    other = prepared(own.replace(chat_template_kwargs=None))
    assert other.blocks.digest != prepared(own).blocks.digest  # the identity of a cache
    with pytest.raises(SettingsError, match="has no chat template, or several: set CHAT_TEMP"):
        prepared(settings(**data, chat_template_kwargs={"x": 1}))


def test_variables_and_files_that_no_template_can_use_are_refused(settings, tmp_path):
    for name in ("messages", "a-b"):
        with pytest.raises(InputError, match=f"CHAT_TEMPLATE_KWARGS sets '{name}'"):
            run(settings(chat_template_kwargs={name: []}, chat_template_path=chatml(tmp_path)))
    (tmp_path / "x.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"x\.jinja is not UTF-8"):
        run(settings(chat_template_path=str(tmp_path / "x.jinja")))


def chatml(folder):
    (path := folder / "ok.jinja").write_text("{{ messages }}")
    return str(path)
