"""A teacher of the student's family: the same ids, except for tokens that one side added."""

import copy
import json
import logging

import pytest
import torch

from ssl_kd.core.precision import Precision
from ssl_kd.core.runs.clock import no_progress
from ssl_kd.core.settings import SettingsError
from ssl_kd.language.models.causal import CausalLM
from ssl_kd.language.prepare import prepare
from ssl_kd.language.run import run
from ssl_kd.language.teachers.caching import cache_teacher
from ssl_kd.language.teachers.load import set_attention
from tests.faults.matrix import row as fault
from tests.language.test_run import log_lines, metrics, table


@pytest.fixture(scope="session")
def more_tokens(tiny):
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return tokenizer


@pytest.fixture
def folders(tiny, more_tokens, tmp_path):
    """A model of the family with two tokens more, and rows of padding; and a plain one."""
    padded = tiny.folder(tmp_path / "padded", tokenizer=more_tokens, vocab_size=336)
    return padded, tiny.folder(tmp_path / "plain", seed=4)


def test_a_teacher_with_added_tokens_teaches(settings, folders, caplog):
    padded, plain = folders
    caplog.set_level(logging.INFO)
    folder = run(settings(teacher_model=padded, student_model=plain))
    assert "only 2 tokens of the teacher and 0 of the student are not shared" in caplog.text
    rows = table(folder)
    assert rows["student"]["kl"] < rows["student before"]["kl"]
    assert metrics(folder)["learned_from"]["kd"] == 6


def test_its_cache_does_too_where_the_student_has_rows_for_its_tokens(
    settings, folders, tiny, tmp_path
):
    padded, plain = folders
    roomy = tiny.folder(tmp_path / "roomy", vocab_size=328, seed=4)
    for method in ("sample", "topk"):
        own = settings(
            teacher_model=padded,
            student_model=roomy,
            teacher_cache=str(tmp_path / method),
            cache_method=method,
            run_name=method,
        )
        cache_teacher(own)
        assert metrics(run(own))["learned_from"]["kd"] == 6
    with pytest.raises(
        SettingsError,
        match="may hold 322 tokens, but the vocabulary of the student .* has 320 rows",
    ):
        run(own.replace(student_model=plain, run_name="narrow"))


@fault(116)
def test_a_token_that_the_teacher_lacks_is_refused_where_it_is_read(
    settings, folders, tmp_path, caplog
):
    padded, plain = folders
    caplog.set_level(logging.INFO)
    swapped = {"teacher_model": plain, "student_model": padded}
    run(settings(**swapped, max_steps=1))  # the text has none of them
    assert "only 0 tokens of the teacher and 2 of the student are not shared" in caplog.text
    text = tmp_path / "thinks.jsonl"
    lines = [{"text": f"a <think> {i}" if i % 7 else "the old fox"} for i in range(40)]
    text.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(SettingsError, match="holds the student's token '<think>', which the teach"):
        run(settings(**swapped, data_path=str(text), run_name="b"))


def test_adapters_on_a_halved_base_learn_as_on_a_full_one(settings, folders, monkeypatch):
    """A run in bfloat16: the base is halved in memory, and the run is the same to the bit."""
    from ssl_kd.language import prepare as task

    half = {"teacher_model": folders[0], "student_model": folders[1]}
    half |= {"lora_rank": 2, "model_dtype": "bfloat16"}
    monkeypatch.setattr(
        "ssl_kd.core.precision.DeviceInfo.halves", lambda self: ((torch.bfloat16,), "a test")
    )
    seen = []

    def halved(model, dtype):
        seen.append(dtype)

    first = run(settings(**half, run_name="halved"))
    monkeypatch.setattr(task, "halve_products", halved)
    second = run(settings(**half, run_name="full"))
    assert seen == [torch.bfloat16]
    assert log_lines(first) == log_lines(second)


def test_the_attention_of_both_models_is_set(settings, folders, tmp_path):
    chosen = prepare(
        settings(teacher_model=folders[1], student_model=folders[1], attn_implementation="eager"),
        Precision.for_device("cpu"),
        no_progress,
    )
    for lm in (chosen.student, *chosen.teacher.lms):
        assert lm.model.config._attn_implementation == "eager"


def test_an_attention_that_a_model_lacks_is_refused(tiny):
    lm = CausalLM.of(tiny.model("GPT2"), tiny.tokenizer, "gpt2")
    with pytest.raises(SettingsError, match="'flex_attention', which gpt2 cannot use.*'sdpa'"):
        set_attention(lm, "flex_attention")
    assert lm.model.config._attn_implementation == "sdpa"
