"""Judge without labels which of two clusterings of the same samples is better.

A criterion computed in one embedding favors the clusters formed in it. Here both clusterings are
judged by the same pairs of samples: those that are mutual neighbors in both embeddings. The better
one tells more about a sample's cluster from its neighbor's cluster, for its number of clusters.

SLOPE and FLOOR were fitted on nine sets (docs/results.md). On the others the better clustering was
found about as often as the stated probability says. Where few samples have a common neighbor, or
the probability depends on which samples are drawn, nothing is judged. The probability is at most
1 - FLOOR, as two embeddings may share neighbors that do not matter (of photos, those with the same
colors).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ssl_kd.vision.cache import nearest_neighbors
from ssl_kd.vision.graph import partition_value

Ints = NDArray[np.int64]

JUDGED = 2000  # samples that are judged, at most
NEIGHBORS = 15
ALPHA = 0.75  # power of the entropy in the value of a partition
SLOPE, FLOOR = 16.4, 0.091  # of the probability, as a function of the difference in value
SURE = 2 / 3  # least probability at which one clustering is called better
RESAMPLES, INTERVAL = 100, (0.05, 0.95)
FEWEST_PAIRS, LEAST_DISAGREEMENT = 20, 0.01
# Beyond these limits the judgement abstains. It was wrong in a third of the cases with a wider
# interval, and in half of the cases on photographs through different teachers, few of which have a
# common neighbor (docs/results.md).
LEAST_COVERED, WIDEST_INTERVAL = 1 / 3, 0.1


def cannot_judge(reason: str, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the judgement for data that cannot be judged."""
    verdict = f"Which is better cannot be told without labels: {reason}."
    evidence = {} if facts is None else dict(facts)
    return {
        "better": None,
        "probability": None,
        "reason": reason,
        "verdict": verdict,
        "evidence": evidence,
    }


def judge(x_a: NDArray, x_b: NDArray, clusters_a: Ints, clusters_b: Ints) -> dict[str, Any]:
    """Return which clustering of n samples is better, given both embeddings, `[n, d]` each.

    The result holds `better` (`a`, `b` or None), the `probability` that A is better, a sentence
    `verdict`, and the `evidence` for it. If the evidence is too weak, `better` and `probability`
    are None, and `reason` says why; it is None otherwise.
    """
    a, b = (np.unique(clusters, return_inverse=True)[1] for clusters in (clusters_a, clusters_b))
    n = len(a)
    pairs = common_neighbors(x_a, x_b)
    if pairs.shape[1] < FEWEST_PAIRS:
        return cannot_judge(f"only {pairs.shape[1]} pairs of samples are neighbors in both runs")
    weights = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    resampled = [probability(evidence(pairs, a, b, of_sample)) for of_sample in weights]
    of_a, (low, high) = float(probability(evidence(pairs, a, b))), np.quantile(resampled, INTERVAL)
    covered = len(np.unique(pairs[0])) / n
    facts = {
        "value of A": round(value(pairs, a), 4),
        "value of B": round(value(pairs, b), 4),
        "90 % interval of the probability that A is better, over resampled samples, %": (
            f"{100 * low:.0f} to {100 * high:.0f}"
        ),
        "samples judged": n,
        "neighbors that both runs share, per sample": round(pairs.shape[1] / n, 2),
        "samples with such a neighbor, %": round(100 * covered, 1),
    }
    if reason := _weakness(covered, low, high):
        return cannot_judge(reason, facts)
    better = "a" if of_a >= SURE else "b" if of_a <= 1 - SURE else None
    verdict = "No difference in quality can be told without labels (A is better with a probability"
    verdict += f" of {100 * of_a:.0f} %)."
    if better:
        verdict = f"Judged without labels, {better.upper()} is better"
        verdict += f" (probability {100 * max(of_a, 1 - of_a):.0f} %)."
    return {
        "better": better,
        "probability": of_a,
        "reason": None,
        "verdict": verdict,
        "evidence": facts,
    }


def _weakness(covered: float, low: float, high: float) -> str:
    """Return why the evidence is too weak for a judgement; empty if it is strong enough.

    `covered` is the share of samples with a common neighbor, 0 to 1; `low` and `high` are the ends
    of the interval of the probability.
    """
    reasons = []
    if covered < LEAST_COVERED:
        reasons.append(
            f"only {100 * covered:.0f} % of the samples have a common neighbor in both runs, fewer "
            f"than {100 * LEAST_COVERED:.0f} %"
        )
    if high - low > WIDEST_INTERVAL:
        reasons.append(
            f"with other samples the probability would be anywhere from {100 * low:.0f} to "
            f"{100 * high:.0f} %"
        )
    return ", and ".join(reasons)


def common_neighbors(x_a: NDArray, x_b: NDArray) -> Ints:
    """Return the pairs `[2, pair]` of mutual neighbors in both embeddings, each in both orders."""
    n = len(x_a)
    k = min(NEIGHBORS, n - 1)
    if k < 1:
        return np.empty((2, 0), np.int64)
    mutual = []
    for x in (x_a, x_b):
        near = nearest_neighbors(torch.from_numpy(np.ascontiguousarray(x, np.float32)), k).numpy()
        rows = np.repeat(np.arange(n), k)
        mutual.append(np.intersect1d(rows * n + near.ravel(), near.ravel() * n + rows))
    return np.stack(np.divmod(np.intersect1d(*mutual), n))


def evidence(pairs: Ints, a: Ints, b: Ints, weights: NDArray | None = None) -> float:
    """Return how much better clusters `a` are than `b` (`[n]`, numbered without gaps).

    It is the difference in value over the disagreement of the two clusterings (1 - ARI). `weights`
    `[n]` count each sample's pairs several times, or not at all.
    """
    from sklearn.metrics import adjusted_rand_score

    disagreement = max(1 - adjusted_rand_score(a, b), LEAST_DISAGREEMENT)
    return (value(pairs, a, weights) - value(pairs, b, weights)) / disagreement


def probability(evidence: Any, slope: float = SLOPE, floor: float = FLOOR) -> Any:
    """Return the probability that A is better, between `floor` and `1 - floor`."""
    return floor + (1 - 2 * floor) / (1 + np.exp(-slope * evidence))


def value(pairs: Ints, clusters: Ints, weights: NDArray | None = None) -> float:
    """Return the partition value of clusters on a graph with an edge for each of the pairs."""
    k = int(clusters.max()) + 1
    cells = clusters[pairs[0]] * k + clusters[pairs[1]]
    of_pairs = None if weights is None else weights[pairs[0]]
    table = np.bincount(cells, of_pairs, k * k).reshape(k, k)
    return partition_value((table + table.T) / max(2 * table.sum(), 1), ALPHA)
