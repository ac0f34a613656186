"""Repetition and ROUGE-L against counting by hand, by force and by the reference package."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssl_kd.evaluate.texts import distinct, repetition, rouge_l


def test_repetition_counts_within_a_text_and_distinct_over_all():
    loop, free = list("abcdabcdabcd"), list("abcdefgh")
    assert repetition([loop]) == 1 - 4 / 9
    assert repetition([free]) == 0
    assert repetition([loop, free, ["a"]]) == pytest.approx((1 - 4 / 9) / 2)  # one word: none
    assert repetition([free, free]) == 0  # two texts may be the same
    assert distinct([free, free]) == 0.5
    assert distinct([["a"]]) is None and repetition([]) is None


words = st.lists(st.sampled_from("abc"), max_size=7)


@given(words, words.filter(len))
def test_rouge_l_by_all_subsequences(text, reference):
    def all_of(row):
        return {c for n in range(len(row) + 1) for c in combinations(row, n)}

    longest = max(map(len, all_of(text) & all_of(reference)))
    expected = 2 * longest / (len(text) + len(reference))
    assert rouge_l(" ".join(text), " ".join(reference)) == pytest.approx(expected)


def test_words_of_any_script():
    assert rouge_l("Die Füchse, schnell!", "die füchse SCHNELL") == 1
    assert rouge_l("лиса спит", "лиса ест") == 0.5
    assert rouge_l("", "a fox") == 0 and rouge_l("a fox", " ... ") is None


def test_english_scores_as_in_the_package():
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    pairs = [
        ("The old fox's den, 2 miles off.", "An old fox lives 2 miles off; the den is its own."),
        ("Lily saw a bird. The bird sang.", "A small bird sang, and Lily_too saw the bird!"),
        ("nothing", "in common"),
    ]
    for text, reference in pairs:
        expected = scorer.score(reference, text)["rougeL"].fmeasure
        assert rouge_l(text, reference) == pytest.approx(expected)
