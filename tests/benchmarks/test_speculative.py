"""Drafting: expected acceptance, and what transformers' assisted generation really does with it."""

import math

import pytest
import torch

from benchmarks.speculative import draft, expected_tokens, own_text
from ssl_kd.evaluate.generation import sample_tokens
from ssl_kd.evaluate.language import judge_tokens
from ssl_kd.teachers.frozen import FrozenTeacher


@pytest.fixture(scope="module")
def pair(tiny):
    """A teacher, and a student that is near it."""
    teacher, student = (tiny.model(seed=3, spread=0.3) for _ in range(2))
    with torch.no_grad():
        for p in student.parameters():
            p += 0.05 * torch.randn_like(p)
    return FrozenTeacher(teacher), student


def prompts(tiny, n=4):
    texts = (example.text for example in tiny.texts(n).examples)
    return [[0, *tiny.tokenizer(text[:20], add_special_tokens=False).input_ids] for text in texts]


def test_expected_tokens_are_the_closed_form():
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert expected_tokens(1.0, 4) == 5 and expected_tokens(0.0, 4) == 1


def test_the_teachers_own_text_is_what_counts(tiny, pair):
    teacher, _ = pair
    asked = prompts(tiny)
    state = torch.get_rng_state()
    rows = own_text(teacher, tiny.tokenizer, asked, max_new_tokens=10, batch_size=3, seed=5)
    assert torch.equal(state, torch.get_rng_state())
    for i, prompt in enumerate(asked):
        real = int((rows.documents[i] > 0).sum())
        assert rows.ids[i, : len(prompt)].tolist() == prompt
        assert rows.counts[i].nonzero()[:, 0].tolist() == list(range(len(prompt), real))
        assert 1 <= real - len(prompt) <= 10
    again = own_text(teacher, tiny.tokenizer, asked, max_new_tokens=10, batch_size=3, seed=5)
    other = own_text(teacher, tiny.tokenizer, asked, max_new_tokens=10, batch_size=3, seed=6)
    assert torch.equal(rows.ids, again.ids) and not torch.equal(rows.ids, other.ids)
    twin = judge_tokens(teacher.model, rows, teacher=teacher)
    assert twin.acceptance == pytest.approx(1, abs=1e-5) and twin.tokens == int(rows.counts.sum())


def test_padding_does_not_change_what_is_sampled_from(tiny, pair):
    """Draws at temperature 1, from the whole distribution, beside its own probabilities."""
    model, short = pair[0].model, [0, 9]
    drawn = sample_tokens(model, tiny.tokenizer, [short, [0, *range(5, 15)]] * 2000, 1)[::2]
    counts = torch.bincount(torch.tensor(drawn).flatten(), minlength=len(tiny.tokenizer)).double()
    with torch.no_grad():
        p = model(torch.tensor([short])).logits[0, -1].double().softmax(-1)
    chi2 = ((counts - 2000 * p) ** 2 / (2000 * p)).sum().item()
    n = len(p) - 1
    assert chi2 < n + 5 * math.sqrt(2 * n)  # five standard deviations


def test_greedy_drafts_change_no_token_and_are_counted(tiny, pair):
    teacher, student = pair
    asked = prompts(tiny, 3)
    found = draft(teacher, student, tiny.tokenizer, asked, max_new_tokens=12, drafted=3)
    assert found.same == 3 and found.tokens <= 36
    assert found.verifications <= found.tokens == found.accepted + found.verifications
    assert 0 < found.accepted < found.judged
    assert len(found.speedup) == len(found.cost) == 3 and min(*found.speedup, *found.cost) > 0
    facts = found.facts(3)
    assert facts["tokens_per_verification"] == pytest.approx(facts["accepted_per_verification"] + 1)
    assert facts["acceptance"] == found.accepted / found.judged


def test_a_twin_is_always_accepted_and_its_settings_come_back(tiny, pair):
    teacher, _ = pair
    twin = tiny.model(seed=3, spread=0.3).train()
    config = twin.generation_config
    before = config.to_dict()
    found = draft(teacher, twin, tiny.tokenizer, prompts(tiny, 2), max_new_tokens=9, drafted=2)
    assert found.accepted == found.judged and found.same == 2
    assert found.verifications == 6  # of three tokens each
    assert config.to_dict() == before and twin.training


def test_the_acceptance_that_is_expected_is_that_of_sampled_drafts(tiny, pair):
    teacher, student = pair
    asked = prompts(tiny, 4) * 3
    rows = own_text(teacher, tiny.tokenizer, asked, max_new_tokens=24)
    expected = judge_tokens(student, rows, teacher=teacher).table_row("")["acceptance"]
    found = draft(
        teacher, student, tiny.tokenizer, asked, max_new_tokens=24, drafted=3, sample=True
    )
    assert isinstance(expected, float) and found.same is None and found.judged > 100
    deviation = math.sqrt(expected * (1 - expected) / found.judged)
    assert abs(found.accepted / found.judged - expected) < 4 * deviation + 0.02
