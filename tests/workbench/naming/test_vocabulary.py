"""Names from a vocabulary, by a stand-in for CLIP whose space is known."""

import numpy as np
import pytest
import torch

from ssl_kd.errors import InputError
from ssl_kd.workbench.naming import cluster_means, names_from_vocabulary

WORDS = ("cat", "dog", "ship", "plane", "thing")


def encode(texts: list[str]) -> torch.Tensor:
    """Each word is an axis; `thing` lies in the middle of all."""
    axes = dict(zip(WORDS, torch.eye(4).tolist(), strict=False)) | {"thing": [0.6] * 4}
    return torch.tensor([axes[text.removeprefix("a photo of a ")] for text in texts])


def pictures(noise=0.3, n=40):
    rng = np.random.default_rng(0)
    clusters = np.repeat([0, 1, 2, 3], n)
    # Two animals near each other, two vehicles near each other, all far out along one direction.
    centres = np.array([[1, 0.6, 0, 0], [0.6, 1, 0, 0], [0, 0, 1, 0.6], [0, 0, 0.6, 1.0]]) + 0.5
    x = centres[clusters] + noise * rng.normal(size=(4 * n, 4))
    return x, {"level_2": clusters // 2, "cluster": clusters}


def test_every_level_gets_the_words_that_set_it_apart():
    x, levels = pictures()
    means = cluster_means([(0, x[:50]), (50, torch.tensor(x[50:]))], levels)
    names = names_from_vocabulary(means, levels, [*WORDS, "cat"], encode)
    assert [names.of("cluster", c) for c in range(4)] == ["cat", "dog", "ship", "plane"]
    coarse = [names.of("level_2", c) for c in range(2)]
    assert coarse[0] in ("cat", "dog") and coarse[1] in ("ship", "plane")
    words = names.levels["cluster"][2].words
    assert words[0][0] == "ship" and words[0][1] > words[1][1]


def test_means_are_those_of_unit_rows():
    x, levels = pictures()
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    means = cluster_means([(0, x)], levels)["cluster"]
    assert np.allclose(means[2], unit[levels["cluster"] == 2].mean(0))
    assert -1 not in cluster_means([(0, x)], {"cluster": np.full(len(x), -1)})["cluster"]


def test_fewer_words_than_clusters():
    x, levels = pictures()
    means = cluster_means([(0, x)], levels)
    names = names_from_vocabulary(means, levels, ["cat", "ship"], encode).levels["cluster"]
    texts = [name.text for name in names.values()]
    assert len(set(texts)) == 4 and {"cat", "ship"} < set(texts)


def test_an_encoder_that_does_not_fit():
    x, levels = pictures()
    means = cluster_means([(0, x)], levels)
    with pytest.raises(InputError, match=r"gave \[5, 3\] for 5 texts, and the embeddings are 4"):
        names_from_vocabulary(means, levels, WORDS, lambda texts: np.zeros((len(texts), 3)))
    with pytest.raises(InputError, match="not finite"):
        names_from_vocabulary(means, levels, WORDS, lambda texts: encode(texts) * float("nan"))
    with pytest.raises(InputError, match="has no word"):
        names_from_vocabulary(means, levels, [" "], encode)
    with pytest.raises(InputError, match="prompt is 'a photo'"):
        names_from_vocabulary(means, levels, WORDS, encode, prompt="a photo")
