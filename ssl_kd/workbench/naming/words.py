"""Names by contrastive words: frequent in a cluster and rare in the ones beside it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.stats import hypergeom
from sklearn.feature_extraction.text import CountVectorizer

from ssl_kd.errors import InputError
from ssl_kd.workbench.naming.names import Names, named, siblings

WORDS = 10  # kept of each cluster
SHARPNESS = 3  # fitted on half of the articles of docs/results.md#names
CHANCE = 0.01  # that a cluster of random texts gets a name
LEAST_LIFT = 0.5  # a word of a name is at least twice as frequent as in the siblings' texts
TOKEN = r"(?u)[^\W\d_]{2,}"  # letters; a number says nothing of what is in a picture
_BOUNDARY = re.compile(r"(?<=[a-z])(?=[A-Z])|[\W\d_]+")


def names_from_texts(
    texts: Sequence[str],
    levels: Mapping[str, NDArray[np.integer]],
    *,
    vectorizer: CountVectorizer | None = None,
) -> Names:
    """Name clusters by the words of their texts that set them apart from their siblings.

    A word weighs `W max(0, 1 - f_siblings / f)^3`: W is its c-TF-IDF, f its share of the words of
    the cluster and f_siblings that of the siblings' words. What every cluster says ("the", "photo")
    weighs nothing, in any language, without a list of such words.

    A name begins with a word that tells the cluster apart: one that is at least twice as frequent
    as in the siblings' texts, and stands in more of its texts than chance would put there, by
    Fisher's exact test at one in a hundred for all words of a cluster (Bonferroni), or in half
    of its texts and in none of theirs, which a few samples cannot show to be more than chance.
    Other words of a name are twice as frequent, too.

    Args:
        texts: of each sample, `[n]`; empty ones are passed over.
        levels: level -> each sample's cluster `[n]`, coarsest level first; -1 is no cluster.
        vectorizer: how words are counted; by default runs of two letters and more, in lower case.

    Returns:
        The names. A cluster keeps its number where no word stands in two of its texts, or none
        tells it apart.

    Raises:
        InputError: as many texts as samples were expected.

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
                f"{len(texts)} texts came for {len(clusters)} samples ({level}): give each sample "
                "one, an empty one where there is none"
            )
    counted = CountVectorizer(token_pattern=TOKEN) if vectorizer is None else vectorizer
    try:
        counts = sparse.csr_matrix(counted.fit_transform(texts))
    except ValueError as error:
        if "empty vocabulary" not in str(error):
            raise
        return Names({level: {} for level in levels})
    vocabulary = counted.get_feature_names_out()
    found = {}
    for level, clusters in levels.items():
        beside = siblings(levels, level)
        found[level] = named(_contrasted(counts, vocabulary, clusters, beside))
    return Names(found)


def class_tfidf(counts: sparse.csr_matrix) -> sparse.csr_matrix:
    """c-TF-IDF, `W = tf log(1 + A / f)`: the weight of each term for each class.

    tf is the term's share of the words of the class (the paper's count, divided by a constant of
    the class, so that classes of any size compare), f how often it occurs in all classes, and A
    the mean number of words of a class.

    Args:
        counts: how often each term occurs, `[class, term]`.

    Returns:
        The weights `[class, term]` float64, with entries where `counts` has them.

    References:
        Grootendorst (2022), eq. 2.
    """
    totals = np.asarray(counts.sum(1)).ravel()
    often = np.asarray(counts.sum(0)).ravel()
    rarity = np.log1p(totals.mean() / np.maximum(often, 1))
    shares = sparse.diags(1 / np.maximum(totals, 1)) @ counts
    return sparse.csr_matrix(shares @ sparse.diags(rarity))


def file_words(files: Sequence[str], leave_out: Collection[str] = ()) -> list[str]:
    """The words of file names and their folders, one text each.

    Args:
        files: paths.
        leave_out: folders that say nothing here, above all those that are classes: a name that
            comes from a label would tell what was not found.

    >>> file_words(["holiday/beach/IMG_0042_redBoat.jpg"], leave_out={"beach"})
    ['holiday IMG red Boat']
    """
    texts = []
    for file in files:
        *folders, last = file.replace("\\", "/").split("/")
        stem = last.rpartition(".")[0] or last
        parts = [part for part in folders if part not in leave_out] + [stem]
        texts.append(" ".join(word for p in parts for word in _BOUNDARY.split(p) if word))
    return texts


def _contrasted(
    counts: sparse.csr_matrix,
    vocabulary: NDArray[np.object_],
    clusters: NDArray[np.integer],
    beside: Mapping[int, list[int]],
) -> dict[int, list[tuple[str, float]]]:
    """The heaviest words of each cluster of one level."""
    ids = sorted(beside)
    members = clusters >= 0
    places = np.searchsorted(ids, clusters[members])
    where = (places, np.flatnonzero(members))
    belongs = sparse.csr_matrix((np.ones(len(places)), where), (len(ids), len(clusters)))
    often_in = sparse.csr_matrix(belongs @ counts)  # [cluster, term]
    texts = sparse.csr_matrix(belongs @ (counts > 0))  # in how many texts of it
    sizes = belongs @ (np.diff(counts.indptr) > 0)  # how many texts it has
    all_texts = np.asarray(texts.sum(0)).ravel()
    weights, totals = class_tfidf(often_in), np.asarray(often_in.sum(1)).ravel()
    place_of, all_counts = (
        {c: place for place, c in enumerate(ids)},
        np.asarray(often_in.sum(0)).ravel(),
    )
    found = {}
    for place, cluster in enumerate(ids):
        row = often_in[place]
        terms, often = row.indices, row.data
        others = [place_of[c] for c in beside[cluster]]
        if len(others) == len(ids) - 1:  # all the others: no need to add them up
            theirs, total = all_counts[terms] - often, totals.sum() - totals[place]
            elsewhere, n_others = all_texts[terms], sizes.sum() - sizes[place]
            elsewhere = elsewhere - texts[place, terms].toarray().ravel()
        else:
            theirs = np.asarray(often_in[others][:, terms].sum(0)).ravel()
            elsewhere = np.asarray(texts[others][:, terms].sum(0)).ravel()
            total, n_others = totals[others].sum(), sizes[others].sum()
        lift = 1 - (theirs / max(total, 1)) / (often / max(totals[place], 1))
        weight = weights[place, terms].toarray().ravel() * np.maximum(lift, 0) ** SHARPNESS
        inside = texts[place, terms].toarray().ravel()
        known = (inside >= 2) & (weight > 0)
        telling = np.zeros(len(terms), bool)
        telling[known] = _tell_apart(inside[known], elsewhere[known], sizes[place], n_others)
        telling &= lift >= LEAST_LIFT
        known &= (lift >= LEAST_LIFT) & telling.any()
        order = np.lexsort((vocabulary[terms].astype(str), -weight, ~telling))
        order = [at for at in order if known[at]][:WORDS]
        found[cluster] = [(str(vocabulary[terms[at]]), float(weight[at])) for at in order]
    return found


def _tell_apart(
    inside: NDArray[np.floating], elsewhere: NDArray[np.floating], n: float, n_others: float
) -> NDArray[np.bool_]:
    """Whether each word is in more of a cluster's n texts than chance would put there.

    Args:
        inside: how many of them have the word, `[word]`.
        elsewhere: how many of the siblings' texts have it.
        n: the cluster's texts.
        n_others: the siblings' texts; without any nothing is to be told apart.
    """
    if not n_others:
        return np.ones(len(inside), bool)
    chance = hypergeom.sf(inside - 1, n + n_others, inside + elsewhere, n)
    return (chance * len(inside) <= CHANCE) | ((2 * inside >= n) & (elsewhere == 0))
