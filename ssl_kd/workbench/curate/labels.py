"""Samples whose label their neighbours and a classifier do not share."""

from __future__ import annotations

import logging
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

from ssl_kd.errors import InputError
from ssl_kd.store import EmbeddingStore, find_neighbours
from ssl_kd.workbench.curate.duplicates import NEIGHBOURS
from ssl_kd.workbench.curate.ranked import Ranked
from ssl_kd.workbench.curate.spacing import neighbour_distances, similarity

logger = logging.getLogger(__name__)

TEMPERATURE = 0.07  # of the neighbours' votes, as in the k-NN accuracy
FOLDS = 5
ROUNDS = 2  # of the neighbours' votes; from the second on each counts as far as it is believed
BUDGET = 200_000_000  # rows x dimensions x classes that a classifier learns from
PREDICTED = 8192  # rows at once


def mislabelled(
    store: EmbeddingStore,
    labels: NDArray[np.integer] | None = None,
    *,
    clusters: NDArray[np.integer] | None = None,
    search: str = "auto",
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Ranked:
    """The labelled samples by how little others support their label.

    The score is 1 minus the probability that others give to the label: the mean of the vote of the
    20 nearest (leave one out), of a logistic regression that learned from the other four fifths,
    and, where there are clusters, of the shares of the labels among the other members of the
    sample's own. The neighbours vote twice; the second time the weight of each, by its nearness, is
    multiplied by the probability of its own label after the first, so that wrong labels speak less.

    The penalty of the regression is that of rows of squared length 1 on average (an inverse of 1),
    whatever their dimensions.

    Args:
        store: n embeddings.
        labels: `[n]`, -1 where unknown; None: those of the store.
        clusters: `[n]` of a run, -1 for none.
        search: as `find_neighbours` takes it.
        device: where all pairs are compared.
        seed: shares the samples out to the folds.

    Returns:
        The labelled samples; columns `label` and `suggested`, the likeliest class: the store's
        names of them, where it has any and `labels` is None.

    Raises:
        InputError: fewer than two classes, or labels of another length.

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
            f"{store.folder} ({store.split}) has labels of fewer than two classes: nothing says "
            "which of them are wrong"
        )
    if len(labels) != store.n:
        raise InputError(f"got {len(labels)} labels for {store.n} samples; expected one of each")
    known = np.flatnonzero(labels >= 0)
    classes, own = np.unique(labels[known], return_inverse=True)
    codes = np.full(store.n, -1)
    codes[known] = own
    parts: list[NDArray[np.floating]] = [_by_regression(store, known, own, len(classes), seed)]
    if clusters is not None:
        parts.append(_by_cluster(np.asarray(clusters)[known], own, len(classes)))
    neighbours, _ = find_neighbours(
        store, min(NEIGHBOURS, store.n - 1), search=search, device=device
    )
    mean, belief = parts[0], np.ones(store.n)
    for _ in range(ROUNDS):
        votes = _by_neighbours(store, neighbours, codes, len(classes), belief)[known]
        mean = np.mean([votes, *parts], 0)
        belief[known] = mean[np.arange(len(known)), own]
    suggested = classes[mean.argmax(1)]
    columns = {"label": labels[known], "suggested": suggested}
    if names is not None:
        columns = {name: names[numbers] for name, numbers in columns.items()}
    return Ranked(store.ids, known, 1 - belief[known], columns)


def _by_neighbours(
    store: EmbeddingStore,
    neighbours: Tensor,
    codes: NDArray[np.integer],
    n_classes: int,
    belief: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Votes of the labelled neighbours, `[n, class]`; even where there are none.

    A vote weighs by the neighbour's nearness and by the belief in it, `[n]`, 0 ... 1.
    """
    votes = np.zeros((store.n, n_classes), np.float32)
    for rows, others, distance in neighbour_distances(store, neighbours):
        cosine = similarity(distance)
        weight = np.exp((cosine - cosine[:, :1]) / TEMPERATURE)
        weight *= belief[others]
        for place in range(others.shape[1]):
            voted = codes[others[:, place]]
            heard = voted >= 0
            votes[rows[heard], voted[heard]] += weight[heard, place]
    total = votes.sum(1, keepdims=True)
    return np.where(total > 0, votes / np.where(total > 0, total, 1), 1 / n_classes)


def _by_regression(
    store: EmbeddingStore, known: NDArray[np.int64], own: NDArray, n_classes: int, seed: int
) -> NDArray[np.float32]:
    """Probabilities `[m, class]` by classifiers that did not learn from the sample."""
    found = np.full((len(known), n_classes), 1 / n_classes, np.float32)
    if len(known) < FOLDS:
        return found
    most = max(1000, BUDGET // (store.dim * n_classes))
    rng = np.random.default_rng(seed)
    for learn, judge in KFold(FOLDS, shuffle=True, random_state=seed).split(known):
        if len(learn) > most:
            learn = rng.choice(learn, most, replace=False)
        if len(np.unique(own[learn])) < 2:
            continue
        regression = LogisticRegression(C=1 / store.dim, max_iter=200, tol=1e-3)
        model = make_pipeline(StandardScaler(), regression)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(store.gather(torch.from_numpy(known[learn])).numpy(), own[learn])
        for rows in np.array_split(judge, -(-len(judge) // PREDICTED)):
            x = store.gather(torch.from_numpy(known[rows])).numpy()
            found[rows] = 0
            found[np.ix_(rows, regression.classes_)] = model.predict_proba(x)
    return found


def _by_cluster(clusters: NDArray, own: NDArray, n_classes: int) -> NDArray[np.float64]:
    """Shares of the labels among the other members of each sample's cluster, `[m, class]`."""
    _, code = np.unique(clusters, return_inverse=True)
    counts = np.zeros((code.max() + 1, n_classes))
    np.add.at(counts, (code, own), 1)
    others = counts[code]
    others[np.arange(len(own)), own] -= 1
    alone = (others.sum(1) == 0) | (clusters < 0)
    others[alone] = 1
    return others / others.sum(1, keepdims=True)
