"""Names by contrastive words: known answers, trees, and texts without distinctive words."""

import math

import numpy as np
import pytest
from scipy import sparse

from ssl_kd.errors import InputError
from ssl_kd.workbench.naming.contrastive_words import (
    class_tfidf,
    names_from_texts,
    siblings,
    unique_names,
)


def test_class_tfidf_by_hand():
    # Two classes of 4 and 2 words: A = 3. Term 0 occurs 4 times, term 1 twice.
    counts = sparse.csr_matrix(np.array([[3, 1], [1, 1]]))
    weights = class_tfidf(counts).toarray()
    first, second = math.log(1 + 3 / 4), math.log(1 + 3 / 2)
    assert np.allclose(weights, [[0.75 * first, 0.25 * second], [0.5 * first, 0.5 * second]])


def test_weight_of_a_contrasted_word_by_hand():
    texts = ["cat sofa", "cat", "dog sofa", "dog"]
    names = names_from_texts(texts, {"cluster": np.array([0, 0, 1, 1])})
    # Words of each class: 3 (cat 2, sofa 1). A = 3, cat occurs twice in all, never in the sibling.
    # `sofa` is as frequent in both and stands in one text only.
    expected = (("cat", 2 / 3 * math.log(1 + 3 / 2)),)
    found = names.levels["cluster"][0].words
    assert [word for word, _ in found] == ["cat"]
    assert found[0][1] == pytest.approx(expected[0][1])
    assert names.of("cluster", 1) == "dog"


def test_words_of_every_cluster_name_none():
    texts = [f"a photo of the {word} {i}" for word in ("cat", "dog", "ship") for i in range(5)]
    names = names_from_texts(texts, {"cluster": np.repeat([0, 1, 2], 5)})
    assert [names.of("cluster", c) for c in range(3)] == ["cat", "dog", "ship"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("each", [2, 5, 40, 400])
def test_random_words_name_no_cluster(seed, each):
    rng = np.random.default_rng(seed)
    said = np.array(["mer", "été", "la", "plage", "2023", "img", "soleil", "maman"])
    texts = [" ".join(rng.choice(said, 4)) for _ in range(5 * each)]
    names = names_from_texts(texts, {"cluster": np.repeat(np.arange(5), each)})
    assert names.levels["cluster"] == {}


def test_a_word_that_is_only_a_little_more_frequent_is_no_name():
    texts = ["mer la"] * 1200 + ["la plage"] * 800 + ["mer la"] * 1000 + ["la plage"] * 1000
    names = names_from_texts(texts, {"cluster": np.repeat([0, 1], 2000)})
    assert names.levels["cluster"] == {}, "of 2,000 texts 200 more are no chance, but say little"


def tree():
    kinds = {"dog": ("terrier", "poodle"), "ship": ("ferry", "yacht")}
    texts, fine, coarse = [], [], []
    for parent, (kind, parts) in enumerate(kinds.items()):
        for part, word in enumerate(parts):
            texts += [f"photo of a {kind}, a {word}"] * 6
            fine += [2 * parent + part] * 6
            coarse += [parent] * 6
    return texts, {"level_2": np.array(coarse), "cluster": np.array(fine)}


def test_each_level_is_distinguished_from_its_siblings():
    texts, levels = tree()
    names = names_from_texts(texts, levels)
    parents = names.levels["level_2"]
    assert [parents[c].words[0][0] for c in range(2)] == ["dog", "ship"]
    assert [names.of("cluster", c) for c in range(4)] == ["terrier", "poodle", "ferry", "yacht"]


def test_siblings():
    levels = {"level_2": np.array([0, 0, 0, 1, -1]), "cluster": np.array([2, 0, 0, 1, -1])}
    assert siblings(levels, "level_2") == {0: [1], 1: [0]}
    # 1 is the only part of its parent: it is told from all.
    assert siblings(levels, "cluster") == {0: [2], 2: [0], 1: [0, 2]}


def test_no_two_of_a_level_have_the_same_name():
    words = {0: [("dog", 2.0), ("red", 0.1)], 1: [("dog", 2.0), ("old", 0.1)], 2: [("dog", 1.0)]}
    names = {cluster: name.text for cluster, name in unique_names(words).items()}
    assert names == {0: "dog, red", 1: "dog, old", 2: "dog"}
    alike = {0: [("dog", 1.0), ("cat", 0.9)], 5: [("cat", 1.0), ("dog", 0.9)]}
    assert {name.text for name in unique_names(alike).values()} == {"dog, cat (0)", "cat, dog (5)"}


def test_clusters_without_a_word_keep_their_numbers():
    clusters = np.array([0, 0, 1, 1, 2, 2, -1])
    names = names_from_texts(["cat", "cat", "", "", "one", "other", "ghost"], {"cluster": clusters})
    assert [names.of("cluster", c) for c in (0, 1, 2, -1)] == ["cat", "1", "2", "-1"]
    assert names_from_texts([""] * 7, {"cluster": clusters}).of("cluster", 0) == "0"
    assert names_from_texts([], {"cluster": np.array([], int)}).levels == {"cluster": {}}
    with pytest.raises(InputError, match="got 2 texts for the 7 samples"):
        names_from_texts(["a", "b"], {"cluster": clusters})


def test_one_cluster_alone_is_named_by_its_words():
    names = names_from_texts(["blue bird", "blue egg"], {"cluster": np.zeros(2, int)})
    assert names.of("cluster", 0) == "blue"


def test_words_of_any_script():
    texts = ["Schöne Katze"] * 2 + ["chien très grand"] * 2 + ["кошка спит"] * 2
    names = names_from_texts(texts, {"cluster": np.repeat([0, 1, 2], 2)})
    assert names.of("cluster", 2) == "кошка, спит"
