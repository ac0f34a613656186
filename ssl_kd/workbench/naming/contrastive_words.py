"""Name clusters by words that are frequent in them and rare in neighboring clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.stats import hypergeom
from sklearn.feature_extraction.text import CountVectorizer

from ssl_kd.errors import InputError
from ssl_kd.workbench.naming.names import Name, Names

WORDS = 10  # stored for each cluster
SHARPNESS = 3  # chosen on half of the articles of docs/results.md, and better on the other half
CHANCE = 0.01  # probability that a cluster of random texts gets a name
LEAST_LIFT = 0.5  # a word of a name is at least twice as frequent as in the siblings' texts
TOKEN = r"(?u)[^\W\d_]{2,}"  # letters; numbers rarely describe a picture
SHOWN = 3  # words of a name, if the second and third weigh nearly as much as the first
LEAST_SHARE = 1 / 3  # of the first word's weight


def names_from_texts(
    texts: Sequence[str],
    levels: Mapping[str, NDArray[np.integer]],
) -> Names:
    """Name each cluster by the words that distinguish its texts from those of its siblings.

    The siblings of a cluster are the other parts of its parent in the tree. The weight of a word is
    `W max(0, 1 - f_siblings / f)^3`: W is the c-TF-IDF of the word, f its relative frequency in the
    cluster's texts, and f_siblings its relative frequency in the siblings' texts. Words that all
    clusters share ("the", "photo") have weight 0, so no list of stop words is needed.

    All words of a name are at least twice as frequent as in the siblings' texts. The first word
    must also be significant: it is in more texts of the cluster than chance explains (Fisher's
    exact test at 1 % with Bonferroni's correction), or in half of them and in no sibling's text.
    Words are runs of at least two letters, in lower case.

    Args:
        texts: text of each sample `[n]`; empty texts are skipped.
        levels: level -> cluster of each sample `[n]`, coarsest level first; -1 for no cluster.

    Returns:
        The names. A cluster has no name if none of its words is distinctive and in two texts.

    Raises:
        InputError: the numbers of texts and samples differ.

    References:
        Grootendorst, "BERTopic: Neural topic modeling with a class-based TF-IDF procedure",
        arXiv:2203.05794, 2022, eq. 2.

    >>> texts = ["a red car", "the red car", "a green tree", "green tree, tall"]
    >>> names = names_from_texts(texts, {"cluster": np.array([0, 0, 1, 1])})
    >>> names.of("cluster", 0), names.of("cluster", 1)
    ('car, red', 'green, tree')
    """
    for level, clusters in levels.items():
        if len(clusters) != len(texts):
            raise InputError(
                f"got {len(texts)} texts for the {len(clusters)} samples of {level}: expected one "
                "text per sample, an empty one for a sample without a text"
            )
    vectorizer = CountVectorizer(token_pattern=TOKEN)
    try:
        counts = sparse.csr_matrix(vectorizer.fit_transform(texts))
    except ValueError as error:
        if "empty vocabulary" not in str(error):
            raise
        return Names({level: {} for level in levels})
    terms = vectorizer.get_feature_names_out()
    names = {}
    for level, clusters in levels.items():
        words = _distinctive_words(counts, terms, clusters, siblings(levels, level))
        names[level] = unique_names(words)
    return Names(names)


def class_tfidf(counts: sparse.csr_matrix) -> sparse.csr_matrix:
    """Return the c-TF-IDF `W = tf log(1 + A / f)` of term counts `[class, term]`.

    tf is the term's count divided by the number of words in the class, f the term's count in all
    classes, and A the mean number of words in a class.
    """
    totals = np.asarray(counts.sum(1)).ravel()
    frequency = np.asarray(counts.sum(0)).ravel()
    rarity = np.log1p(totals.mean() / np.maximum(frequency, 1))
    shares = sparse.diags(1 / np.maximum(totals, 1)) @ counts
    return sparse.csr_matrix(shares @ sparse.diags(rarity))


def unique_names(words: Mapping[int, Sequence[tuple[str, float]]]) -> dict[int, Name]:
    """Return a different name for each cluster of a level, given its weighted words.

    A name is the heaviest word, and up to two more with at least a third of its weight. Equal names
    are extended by one word after another, and by the cluster's number when no word is left.

    Args:
        words: cluster number -> (word, weight) pairs, heaviest first.
    """
    length = {
        cluster: sum(weight >= LEAST_SHARE * weighted[0][1] for _, weight in weighted[:SHOWN])
        for cluster, weighted in words.items()
        if weighted
    }

    def equal() -> list[int]:
        keys = {c: frozenset(word for word, _ in words[c][:n]) for c, n in length.items()}
        counts = Counter(keys.values())
        return [cluster for cluster, key in keys.items() if counts[key] > 1]

    while longer := [cluster for cluster in equal() if length[cluster] < len(words[cluster])]:
        for cluster in longer:
            length[cluster] += 1
    numbered, names = set(equal()), {}
    for cluster, n in length.items():
        text = ", ".join(word for word, _ in words[cluster][:n])
        text = f"{text} ({cluster})" if cluster in numbered else text
        names[cluster] = Name(text, text, tuple(words[cluster]))
    return names


def siblings(levels: Mapping[str, NDArray[np.integer]], level: str) -> dict[int, list[int]]:
    """Return the siblings of each cluster of a level: cluster number -> numbers of the siblings.

    Siblings are the other parts of the cluster's parent at the next coarser level. A cluster at the
    coarsest level, or without such parts, has all other clusters of its level as siblings.
    """
    clusters, order = levels[level], list(levels)
    numbers = np.unique(clusters[clusters >= 0]).tolist()
    others = {cluster: [c for c in numbers if c != cluster] for cluster in numbers}
    if position := order.index(level):
        parents = levels[order[position - 1]]
        assigned = (clusters >= 0) & (parents >= 0)
        pairs = np.unique(np.stack([parents[assigned], clusters[assigned]]), axis=1)
        for parent in np.unique(pairs[0]):
            parts = pairs[1][pairs[0] == parent].tolist()
            if len(parts) > 1:
                others |= {part: [c for c in parts if c != part] for part in parts}
    return others


def _distinctive_words(
    counts: sparse.csr_matrix,
    vocabulary: NDArray[np.object_],
    clusters: NDArray[np.integer],
    others: Mapping[int, list[int]],
) -> dict[int, list[tuple[str, float]]]:
    """Return the heaviest words of each cluster of a level; `others` are its `siblings`."""
    ids = sorted(others)
    index = {cluster: place for place, cluster in enumerate(ids)}
    members = np.flatnonzero(clusters >= 0)
    entries = (np.searchsorted(ids, clusters[members]), members)
    belongs = sparse.csr_matrix((np.ones(len(members)), entries), (len(ids), len(clusters)))
    occurrences = sparse.csr_matrix(belongs @ counts)  # [cluster, term]
    texts = sparse.csr_matrix(belongs @ (counts > 0))  # texts of the cluster with the term
    sizes = belongs @ (np.diff(counts.indptr) > 0)  # texts of the cluster
    weights, totals = class_tfidf(occurrences), np.asarray(occurrences.sum(1)).ravel()
    pairs = [(index[cluster], index[other]) for cluster in ids for other in others[cluster]]
    entries = tuple(np.array(pairs, int).reshape(-1, 2).T)
    contrast = sparse.csr_matrix((np.ones(len(pairs)), entries), (len(ids), len(ids)))
    all_counts, all_texts = (sparse.csr_matrix(contrast @ of) for of in (occurrences, texts))
    all_totals, all_sizes = contrast @ totals, contrast @ sizes  # sums over the siblings
    words = {}
    for place, cluster in enumerate(ids):
        row = occurrences[place]
        terms, frequency = row.indices, row.data
        cluster_texts = texts[place, terms].toarray().ravel()
        sibling_counts = all_counts[place, terms].toarray().ravel()
        sibling_texts = all_texts[place, terms].toarray().ravel()
        lift = 1 - (sibling_counts / max(all_totals[place], 1)) / (
            frequency / max(totals[place], 1)
        )
        weight = weights[place, terms].toarray().ravel() * np.maximum(lift, 0) ** SHARPNESS
        usable = (cluster_texts >= 2) & (weight > 0)
        first = np.zeros(len(terms), bool)  # whether a name may begin with it
        first[usable] = _beyond_chance(
            cluster_texts[usable], sibling_texts[usable], sizes[place], all_sizes[place]
        )
        first &= lift >= LEAST_LIFT
        usable &= (lift >= LEAST_LIFT) & first.any()
        order = np.lexsort((vocabulary[terms].astype(str), -weight, ~first))
        chosen = [at for at in order if usable[at]][:WORDS]
        words[cluster] = [(str(vocabulary[terms[at]]), float(weight[at])) for at in chosen]
    return words


def _beyond_chance(
    cluster_texts: NDArray[np.floating],
    sibling_texts: NDArray[np.floating],
    n: float,
    n_sibling_texts: float,
) -> NDArray[np.bool_]:
    """Return True for each word that is in more texts of the cluster than chance explains.

    `cluster_texts` and `sibling_texts` `[word]` count the texts with the word, among `n` texts of
    the cluster and `n_sibling_texts` texts of its siblings.
    """
    if not n_sibling_texts:
        return np.ones(len(cluster_texts), bool)
    chance = hypergeom.sf(cluster_texts - 1, n + n_sibling_texts, cluster_texts + sibling_texts, n)
    return (chance * len(cluster_texts) <= CHANCE) | (
        (2 * cluster_texts >= n) & (sibling_texts == 0)
    )
