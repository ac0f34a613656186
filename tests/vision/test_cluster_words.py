"""The words that tell clusters of texts apart."""

import numpy as np
import pytest

from ssl_kd.vision.cluster_words import ClusterWords

CATS = ["the red cat sat", "the cat ran home", "a cat and the milk"] * 10
DOGS = ["the dog sat", "the old dog ran", "the dog and a bone"] * 10
TEXTS = [*CATS, *DOGS]
CLUSTERS = np.repeat([0, 7], 30)


def test_words_of_one_cluster_come_before_words_of_all():
    words = ClusterWords(TEXTS).of(CLUSTERS)
    assert words[0][0] == "cat" and words[7][0] == "dog"
    assert not {"the", "sat", "ran", "and"} & {*words[0], *words[7]}
    assert ClusterWords(TEXTS).of(CLUSTERS, n_words=1) == {0: ["cat"], 7: ["dog"]}


def test_the_scores_are_those_of_bertopic():
    """The ranking equals that of its formula, computed here word by word."""
    generator = np.random.default_rng(0)
    vocabulary = np.array([f"word{'abcdefghij'[i % 10]}{'abcdefghij'[i // 10]}" for i in range(60)])
    clusters = generator.integers(0, 3, 300)
    texts = [
        " ".join(vocabulary[(generator.zipf(1.5, 12) + 20 * k) % 60]) for k in clusters.tolist()
    ]
    words = [text.split() for text in texts]
    counts = np.zeros((3, 60))
    for k, of_text in zip(clusters, words, strict=True):
        for word in of_text:
            counts[k, vocabulary.tolist().index(word)] += 1
    average, frequency = counts.sum(1).mean(), counts.sum(0)
    idf = np.log(1 + average / frequency)
    scores = np.sqrt(counts / counts.sum(1, keepdims=True)) * idf
    in_texts = np.array([[sum(w in t for t, c in zip(words, clusters, strict=True) if c == k)
                          for w in vocabulary] for k in range(3)])  # fmt: skip
    total = in_texts.sum(0)
    kept = (total >= 2) & ((total <= 30) | (in_texts.max(0) >= 0.95 * total))
    expected = {
        k: [vocabulary[w] for w in np.argsort(-np.where(kept, scores[k], -1))[:5]] for k in range(3)
    }
    assert ClusterWords(texts).of(clusters, n_words=5) == expected


def test_samples_without_a_cluster_do_not_count():
    clusters = np.where(np.arange(60) % 30 < 20, CLUSTERS, -1)
    shown = clusters >= 0
    texts = [text for text, is_shown in zip(TEXTS, shown, strict=True) if is_shown]
    assert ClusterWords(TEXTS).of(clusters) == ClusterWords(texts).of(clusters[shown])


@pytest.mark.parametrize("texts", [[], ["", ""], ["1 2", "3 4"], ["once", "twice"]])
def test_texts_without_a_common_word_have_no_names(texts):
    assert ClusterWords(texts).names(np.arange(len(texts))) == {}


def test_one_cluster_has_no_words():
    assert ClusterWords(CATS).of(np.zeros(30, np.int64)) == {}


def test_words_of_any_alphabet_are_counted():
    texts = ["кот спит", "кот ест", "собака спит", "собака ест"] * 5
    assert ClusterWords(texts).names(np.array([0, 0, 1, 1] * 5)) == {0: "кот", 1: "собака"}


def test_equal_names_get_the_number_of_their_cluster():
    texts = ["cat", "cat", "dog", "dog", "cat", "cat"] * 20
    clusters = np.array([0, 0, 1, 1, 2, 2] * 20)
    texts += ["fox"] * 2000  # so that `cat` is rare
    clusters = np.append(clusters, np.full(2000, 3))
    names = ClusterWords(texts).names(clusters)
    assert names == {0: "cat (0)", 1: "dog", 2: "cat (2)", 3: "fox"}
