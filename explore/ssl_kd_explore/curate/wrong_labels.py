"""Rank samples by how strongly neighbors, a classifier and clusters contradict their label."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from ssl_kd.core.errors import InputError
from ssl_kd.vision.cache import EmbeddingStore, find_neighbors
from ssl_kd_explore.curate.duplicates import NEIGHBORS
from ssl_kd_explore.curate.neighbor_spacing import neighbor_distances, similarity
from ssl_kd_explore.curate.ranked_samples import Ranked

TEMPERATURE = 0.07  # of the neighbors' votes, as in the k-NN accuracy
FOLDS = 5
ROUNDS = 2  # rounds of the neighbors' votes; the second weights each by the belief in its label
BUDGET = 200_000_000  # maximum of rows x dimensions x classes that a classifier is fitted to
PREDICTED = 8192  # rows that are classified at once


def mislabeled(
    store: EmbeddingStore,
    labels: NDArray[np.integer] | None = None,
    *,
    clusters: NDArray[np.integer] | None = None,
) -> Ranked:
    """Rank the labeled samples by how improbable their label is.

    The score is 1 minus the mean of two or three probabilities of the sample's label: the vote of
    its 20 nearest neighbors, a logistic regression that was fitted to the other four folds, and, if
    `clusters` are known, the relative frequency of the label in the rest of the sample's cluster.
    Neighbors vote twice. In the second round each vote is weighted by the probability of the
    neighbor's own label, so that wrong labels count less.

    Args:
        store: n embeddings.
        labels: label of each sample `[n]`, -1 for unknown; None reads the labels of the store.
        clusters: cluster of each sample `[n]`, -1 for no cluster.

    Returns:
        The labeled samples, with the columns `label` and `suggested` (the most probable class).
        Both columns hold class names if the labels are those of a store that has class names.

    Raises:
        InputError: there are fewer than two classes, or not one label per sample.

    References:
        Northcutt et al., Confident learning: Estimating uncertainty in dataset labels, JAIR 2021
        (out-of-sample probabilities; the ranking by self-confidence).
    """
    names = None
    if labels is None:
        labels = None if store.labels is None else store.labels.numpy()
        names = None if store.class_names is None else np.array(store.class_names, dtype=object)
    if labels is None or len(np.unique(labels[labels >= 0])) < 2:
        raise InputError(
            f"the labels of {store.folder} ({store.split}) have fewer than two classes; expected "
            "at least two to look for wrong labels"
        )
    if len(labels) != store.n:
        raise InputError(f"`labels` has {len(labels)} values; expected {store.n}, one per sample")
    known = np.flatnonzero(labels >= 0)
    classes, known_codes = np.unique(labels[known], return_inverse=True)
    codes = np.full(store.n, -1)
    codes[known] = known_codes
    parts: list[NDArray[np.floating]] = [_by_regression(store, known, known_codes, len(classes))]
    if clusters is not None:
        parts.append(_by_cluster(np.asarray(clusters)[known], known_codes, len(classes)))
    k = min(NEIGHBORS, store.n - 1)
    neighbors, _ = find_neighbors(store, k)
    mean, belief = parts[0], np.ones(store.n)
    for _ in range(ROUNDS):
        votes = _by_neighbors(store, neighbors, codes, len(classes), belief)[known]
        mean = np.mean([votes, *parts], 0)
        belief[known] = mean[np.arange(len(known)), known_codes]
    columns = {"label": labels[known], "suggested": classes[mean.argmax(1)]}
    if names is not None:
        columns = {name: names[numbers] for name, numbers in columns.items()}
    return Ranked(store.ids, known, 1 - belief[known], columns)


def _by_neighbors(
    store: EmbeddingStore,
    neighbors: Tensor,
    codes: NDArray[np.integer],
    n_classes: int,
    belief: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Return the neighbors' vote for each class, `[n, class]`, weighted by nearness and belief.

    Votes are uniform for a row without a labeled neighbor.
    """
    votes = np.zeros((store.n, n_classes), np.float32)
    for rows, others, distance in neighbor_distances(store, neighbors):
        cosine = similarity(distance)
        weight = np.exp((cosine - cosine[:, :1]) / TEMPERATURE) * belief[others]
        for place in range(others.shape[1]):
            voted = codes[others[:, place]]
            labeled = voted >= 0
            votes[rows[labeled], voted[labeled]] += weight[labeled, place]
    total = votes.sum(1, keepdims=True)
    return np.where(total > 0, votes / np.where(total > 0, total, 1), 1 / n_classes)


def _by_regression(
    store: EmbeddingStore, known: NDArray[np.int64], known_codes: NDArray, n_classes: int
) -> NDArray[np.float32]:
    """Return cross-validated class probabilities of the labeled samples, `[m, class]`."""
    probabilities = np.full((len(known), n_classes), 1 / n_classes, np.float32)
    if len(known) < FOLDS:
        return probabilities
    most = max(1000, BUDGET // (store.dim * n_classes))
    rng = np.random.default_rng(0)
    for train, test in KFold(FOLDS, shuffle=True, random_state=0).split(known):
        if len(train) > most:
            train = rng.choice(train, most, replace=False)
        if len(np.unique(known_codes[train])) < 2:
            continue
        regression = LogisticRegression(C=1 / store.dim, max_iter=200, tol=1e-3)
        model = make_pipeline(StandardScaler(), regression)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(store.gather(torch.from_numpy(known[train])).numpy(), known_codes[train])
        for rows in np.array_split(test, -(-len(test) // PREDICTED)):
            x = store.gather(torch.from_numpy(known[rows])).numpy()
            probabilities[rows] = 0
            probabilities[np.ix_(rows, regression.classes_)] = model.predict_proba(x)
    return probabilities


def _by_cluster(clusters: NDArray, known_codes: NDArray, n_classes: int) -> NDArray[np.float64]:
    """Return the frequency of each label in the rest of a sample's cluster, `[m, class]`."""
    _, code = np.unique(clusters, return_inverse=True)
    counts = np.zeros((code.max() + 1, n_classes))
    np.add.at(counts, (code, known_codes), 1)
    others = counts[code]
    others[np.arange(len(known_codes)), known_codes] -= 1
    others[(others.sum(1) == 0) | (clusters < 0)] = 1  # no other member
    return others / others.sum(1, keepdims=True)
