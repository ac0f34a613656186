"""Describe the rounds of a growing run: which clusters are new, and what drifted beyond chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.stats
from numpy.typing import NDArray

from ssl_kd.vision.novelty import REFERENCE_ROWS
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions import Curation

CHANCE = 0.01  # probability of a false alarm in a round
ALARM = CHANCE / 2  # largest p-value of an alarm; a round has two tests
DESCRIBED = 20  # rounds, the newest ones
UNUSUAL = 0.99  # outlier score that 1 % of ordinary samples exceed
MIN_EXPECTED = 5  # samples that the chi-squared test expects in a cluster; smaller ones are pooled
TYPICAL = 12  # pictures that represent a new cluster, or the unusual ones


def describe_rounds(samples: Samples) -> list[dict[str, Any]]:
    """Describe the newest rounds of a run (split `train`, `extend1`, ...), the oldest first.

    Shares and names are those of the clusters after all decisions; a new cluster has the number
    under which it was offered.
    """
    curation = Curation(samples)
    splits = [rows for name, rows in samples.splits.items() if name != "test"]
    rounds = [np.arange(rows.start, rows.stop) for rows in splits]
    numbers = range(1, len(rounds) + 1)[-DESCRIBED:]
    return [_describe(samples, curation, rounds[:number]) for number in numbers]


def _describe(samples: Samples, curation: Curation, rounds: list[NDArray]) -> dict[str, Any]:
    """Describe the last of the rounds, each of which is an array of row numbers."""
    *earlier, rows = rounds
    clusters = curation.clusters
    names = curation.names
    n_trained = samples.config["n_clusters"]
    assigned, confidence, outlier = map(samples.column, ("cluster", "confidence", "outlier"))
    n_known = assigned[: rows[0]].max(initial=n_trained - 1) + 1
    joined = rows[assigned[rows] < n_known]
    new_clusters = []
    for number in range(n_known, assigned[rows].max() + 1):
        members = rows[assigned[rows] == number]
        cluster = {"cluster": number, "name": names.get(number, ""), "size": len(members)}
        new_clusters.append(cluster | _highest(samples, members, confidence))
    present, counts = np.unique(clusters[rows][clusters[rows] >= 0], return_counts=True)

    recent = rows[:0]  # the latest earlier rounds with at least as many pictures
    while earlier and len(recent) < len(rows):
        recent = np.concatenate([earlier.pop(), recent])
    drift = compare_shares(clusters[recent], clusters[joined])
    # The scores in added clusters are not comparable: there, only the nearest samples count.
    ordinary = joined[assigned[joined] < n_trained]
    unusual = count_unusual(outlier[ordinary], min(len(rounds[0]), REFERENCE_ROWS))
    p_values = {"shares": drift["p"], "unusual": unusual["p"]}
    described = {
        "round": len(rounds),
        "n": len(rows),
        "joined": len(joined),
        "confidence": float(confidence[rows].mean()),
        "new_clusters": new_clusters,
        "shares": dict(zip(present.tolist(), (counts / counts.sum()).tolist(), strict=True)),
        "drift": drift,
        "unusual": unusual | _highest(samples, ordinary[outlier[ordinary] > UNUSUAL], outlier),
        "alarms": [name for name, p in p_values.items() if p < ALARM],
    }
    return described | {"sentences": _sentences(described, names)}


def _highest(samples: Samples, rows: NDArray, scores: NDArray) -> dict[str, Any]:
    """Return the rows with the highest scores, and their files."""
    first = rows[np.argsort(-scores[rows], kind="stable")[:TYPICAL]]
    return {"rows": first.tolist(), "files": samples.table.column("file").take(first).to_pylist()}


def compare_shares(before: NDArray, now: NDArray) -> dict[str, Any]:
    """Test whether two groups of samples `[n]` are distributed alike over the clusters.

    `p` is that of the chi-squared test of homogeneity, in which clusters with few expected samples
    are pooled; 1 if a group is empty. `changed` lists the clusters whose share changed beyond
    chance, the largest change first (normal approximation, Bonferroni).
    """
    before, now = before[before >= 0], now[now >= 0]
    if not len(before) or not len(now):
        return {"p": 1.0, "changed": []}
    is_now = np.repeat([False, True], [len(before), len(now)])
    table: Any = scipy.stats.contingency.crosstab(is_now, np.r_[before, now])
    (_, clusters), counts = table
    sizes, share = counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()
    is_small = share * sizes.min() < MIN_EXPECTED
    pooled = np.c_[counts[:, ~is_small], counts[:, is_small].sum(1)]
    test: Any = scipy.stats.chi2_contingency(pooled[:, pooled.any(0)], correction=False)
    old, new = counts / sizes
    noise = np.sqrt(share * (1 - share) * (1 / sizes).sum())
    is_changed = np.abs(new - old) > scipy.stats.norm.isf(ALARM / 2 / len(clusters)) * noise
    values = np.c_[clusters, old, new][is_changed].tolist()
    changed = [{"cluster": int(k), "before": before, "now": now} for k, before, now in values]
    changed.sort(key=lambda change: -abs(change["now"] - change["before"]))
    return {"p": float(test.pvalue), "changed": changed}


def count_unusual(scores: NDArray, n_reference: int) -> dict[str, Any]:
    """Test whether more outlier scores `[n]` than by chance are above `UNUSUAL`.

    `p` is that of Fisher's exact test against the `n_reference` training samples that define the
    scale of the scores.
    """
    n, expected = int((scores > UNUSUAL).sum()), (1 - UNUSUAL) * len(scores)
    n_high = round((1 - UNUSUAL) * n_reference)
    table = [[n, len(scores) - n], [n_high, n_reference - n_high]]
    test: Any = scipy.stats.fisher_exact(table, alternative="greater")
    return {"n": n, "expected": expected, "p": float(test.pvalue)}


def _sentences(described: dict[str, Any], names: dict[int, str]) -> list[str]:
    """Return what a round brought, in plain words."""
    if described["round"] == 1:
        return [f"{described['n']:,} pictures in {len(described['shares'])} clusters"]
    text = f"{described['joined']:,} of {described['n']:,} new pictures joined known clusters"
    for new in described["new_clusters"]:
        text += f"; offered as new: cluster {new['cluster']} ({new['size']:,} pictures)"
    sentences, unusual = [text], described["unusual"]
    if "shares" in described["alarms"]:
        changes = []
        for change in described["drift"]["changed"]:
            name = names.get(change["cluster"], f"cluster {change['cluster']}")
            before, now = (f"{100 * change[key]:.0f} %" for key in ("before", "now"))
            changes.append(f"{name} from {before} to {now}")
        text = ", ".join(changes) or "many of them a little"
        sentences.append(f"The shares of the clusters changed beyond chance: {text}")
    if "unusual" in described["alarms"]:
        text = f"{unusual['n']:,} pictures look like nothing seen before"
        sentences.append(f"{text}; by chance it would be about {unusual['expected']:.0f}")
    return sentences if described["alarms"] else [*sentences, "Nothing drifted beyond chance"]
