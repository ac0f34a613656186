"""Find the words that tell the texts of a cluster apart from those of the other clusters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

WORDS = 3  # of a cluster's name
MOST_TEXTS = 20_000  # random ones whose words are counted
_MOST_WORDS = 20_000  # the most frequent ones
_COMMON = 0.1  # share of all texts; a word in more of them says little
_CONCENTRATED = 0.95  # share of the texts with a word, if it may be common
_WORD = r"(?u)\b[^\W\d_]{2,}\b"  # two letters or more, of any alphabet


class ClusterWords:
    """The words of texts, counted once, to describe any clusters of these texts.

    Words are ranked by a class-based TF-IDF: with `c_wk` the number of times a word `w` occurs in
    cluster `k`, `n_k = sum_w c_wk`, `f_w = sum_k c_wk` and `A` the mean of `n_k`, the score is

        sqrt(c_wk / n_k) * log(1 + A / f_w).

    No list of stop words is used, so any language that separates words will do. Left out are words
    of a single text, and those in more than a tenth of all texts, unless 95 % of these are in one
    cluster.

    Args:
        texts: the texts, `[n]`.

    References:
        Grootendorst 2022, "BERTopic: Neural topic modeling with a class-based TF-IDF procedure",
        equation 2, with the square root of BERTopic's `reduce_frequent_words=True`.

    >>> words = ClusterWords(["the cat sat", "the cat ran", "the dog sat", "the dog ran"])
    >>> words.of(np.array([0, 0, 1, 1]))
    {0: ['cat'], 1: ['dog']}
    """

    def __init__(self, texts: Sequence[str]) -> None:
        from sklearn.feature_extraction.text import CountVectorizer

        self._counts: Any = None
        vectorizer = CountVectorizer(token_pattern=_WORD, max_features=_MOST_WORDS, min_df=2)
        try:
            self._counts = vectorizer.fit_transform(texts)
        except ValueError:  # no word is left
            return
        self._words = vectorizer.get_feature_names_out()

    def of(self, clusters: NDArray[np.integer], n_words: int = WORDS) -> dict[int, list[str]]:
        """Return the words of each cluster, most distinctive first.

        Args:
            clusters: number of the cluster of each text, `[n]`; -1 for none.
            n_words: words of a cluster, at most.

        Returns:
            Cluster -> its words; clusters without a word that tells them apart are left out.
        """
        numbers, codes = np.unique(clusters[clusters >= 0], return_inverse=True)
        if self._counts is None or len(numbers) < 2:
            return {}
        rows = np.flatnonzero(clusters >= 0)
        shape = len(numbers), len(clusters)
        members = sparse.csr_array((np.ones(len(rows), np.int64), (codes, rows)), shape)
        counts = (members @ self._counts).toarray().astype(np.float32)  # [cluster, word]
        texts = (members @ (self._counts > 0)).toarray()
        sizes, totals = counts.sum(1, keepdims=True).clip(1), counts.sum(0)
        rarity = np.log1p(sizes.mean() / totals.clip(1))
        is_common = texts.sum(0) > _COMMON * len(rows)
        is_concentrated = texts.max(0) >= _CONCENTRATED * texts.sum(0)
        scores = np.sqrt(counts / sizes) * rarity * (~is_common | is_concentrated)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :n_words]
        found = {
            number: [str(self._words[w]) for w in best[k] if scores[k, w] > 0]
            for k, number in enumerate(numbers.tolist())
        }
        return {number: words for number, words in found.items() if words}

    def names(self, clusters: NDArray[np.integer]) -> dict[int, str]:
        """Return a name of each cluster made of its words; equal ones get the cluster's number."""
        names = {number: ", ".join(words) for number, words in self.of(clusters).items()}
        texts = list(names.values())
        return {k: n if texts.count(n) == 1 else f"{n} ({k})" for k, n in names.items()}
