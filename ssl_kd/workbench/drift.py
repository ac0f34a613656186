"""Compare the rounds of a growing run: which clusters are new, and what drifted beyond chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.stats
from numpy.typing import NDArray

from ssl_kd.vision.novelty import REFERENCE_ROWS
from ssl_kd.vision.samples import Samples
from ssl_kd.workbench.decisions import Curation

CHANCE = 0.01  # probability of a false alarm in a round
TESTS = 3  # in a round: shares of the clusters, distribution of the outlier scores, high scores
UNUSUAL = 0.99  # outlier score that 1 % of ordinary samples exceed
MIN_EXPECTED = 5  # samples that the chi-squared test expects in a cluster; smaller ones are pooled
TYPICAL = 12  # pictures that represent a new cluster, or the unusual ones


def describe_rounds(samples: Samples) -> list[dict[str, Any]]:
    """Describe each round of a run (split `train`, `extend1`, ...) and its drift.

    Shares and names are those of the clusters after all decisions; a new cluster has the number
    under which it was offered.
    """
    curation = Curation(samples)
    splits = [rows for name, rows in samples.splits.items() if name != "test"]
    rounds = [np.arange(rows.start, rows.stop) for rows in splits]
    return [_describe(samples, curation, rounds[:n]) for n in range(1, len(rounds) + 1)]


def _describe(samples: Samples, curation: Curation, rounds: list[NDArray]) -> dict[str, Any]:
    """Describe the last of the rounds, given as row numbers."""
    *earlier, rows = rounds
    assigned, clusters, names = samples.column("cluster"), curation.clusters, curation.names
    confidence, files = samples.column("confidence"), samples.column("file")
    added = np.flatnonzero(assigned[rows] >= samples.config["n_clusters"])  # after the training
    new = np.setdiff1d(assigned[rows[added]], assigned[np.concatenate([rows[:0], *earlier])])
    joined = rows[~np.isin(assigned[rows], new)]
    about: dict[str, Any] = {"round": len(rounds), "n": len(rows), "joined": len(joined)}
    about["new_clusters"] = []
    for k in new.tolist():
        members = rows[assigned[rows] == k]
        typical = members[np.argsort(-confidence[members], kind="stable")[:TYPICAL]]
        cluster = {"cluster": k, "name": names.get(k, ""), "size": len(members)}
        cluster |= {"files": files[typical].tolist(), "rows": typical.tolist()}
        about["new_clusters"].append(cluster)
    about["shares"] = shares_of(clusters[rows])
    about["confidence"] = float(confidence[rows].mean())
    if not earlier:
        text = f"{len(rows):,} pictures in {len(about['shares'])} clusters"
        return about | {"alarms": [], "sentences": [text]}

    recent, enough = earlier[-1], len(rows)
    for before in reversed(earlier[:-1]):
        recent = np.concatenate([before, recent]) if len(recent) < enough else recent
    about["confidence_before"] = float(confidence[recent].mean())
    about["drift"] = compare_shares(clusters[recent], clusters[joined])
    about["drift_since_first"] = compare_shares(clusters[earlier[0]], clusters[joined])
    # The scores in added clusters are not comparable: there, only the nearest samples count.
    ordinary = joined[assigned[joined] < samples.config["n_clusters"]]
    scores = samples.column("outlier")[ordinary]
    about["outliers"] = compare_outliers(scores, min(len(earlier[0]), REFERENCE_ROWS))
    unusual = ordinary[np.argsort(-scores, kind="stable")][: int((scores > UNUSUAL).sum())]
    about["outliers"]["files"] = files[unusual[:TYPICAL]].tolist()
    about["outliers"]["rows"] = unusual[:TYPICAL].tolist()
    about["alarms"] = _alarms(about["drift"], about["outliers"])
    return about | {"sentences": _sentences(about, names)}


def shares_of(clusters: NDArray) -> dict[int, float]:
    """Return cluster -> share of the samples, without samples in no cluster (-1)."""
    numbers, counts = np.unique(clusters[clusters >= 0], return_counts=True)
    return dict(zip(numbers.tolist(), (counts / max(counts.sum(), 1)).tolist(), strict=True))


def compare_shares(before: NDArray, now: NDArray) -> dict[str, Any]:
    """Test whether two groups of samples `[n]` are distributed alike over the clusters.

    `p` is that of the chi-squared test of homogeneity, in which clusters with few expected samples
    are pooled. `changed` lists clusters whose share changed by more than `noise`, the bound that
    chance exceeds in any cluster with probability `CHANCE` (normal approximation, Bonferroni).
    """
    before, now = before[before >= 0], now[now >= 0]
    n_before, n = len(before), len(now)
    result: dict[str, Any] = {"n_before": n_before, "n": n, "p": None, "changed": []}
    if not n_before or not n:
        return result
    numbers, columns = np.unique(np.concatenate([before, now]), return_inverse=True)
    columns = np.split(columns, [n_before])
    counts = np.stack([np.bincount(part, minlength=len(numbers)) for part in columns])
    small = counts.sum(0) * min(n_before, n) / (n_before + n) < MIN_EXPECTED
    pooled = np.concatenate([counts[:, ~small], counts[:, small].sum(1, keepdims=True)], 1)
    pooled = pooled[:, pooled.any(0)]
    if pooled.shape[1] > 1:
        result["p"] = float(scipy.stats.chi2_contingency(pooled, correction=False).pvalue)
    share = counts.sum(0) / (n_before + n)
    deviations = scipy.stats.norm.isf(CHANCE / TESTS / 2 / len(numbers))
    noise = deviations * np.sqrt(share * (1 - share) * (1 / n_before + 1 / n))
    old, new = counts / [[n_before], [n]]
    for k in np.argsort(-np.abs(new - old), kind="stable"):
        if abs(new[k] - old[k]) > noise[k]:
            values = {"before": old[k], "now": new[k], "noise": noise[k]}
            changed = {"cluster": int(numbers[k])} | {name: float(values[name]) for name in values}
            result["changed"].append(changed)
    return result


def compare_outliers(scores: NDArray, n_reference: int) -> dict[str, Any]:
    """Test whether outlier scores `[n]` are higher than those of ordinary samples, in [0, 1].

    `p` is that of the one-sided Kolmogorov-Smirnov test against the uniform distribution,
    `p_unusual` that of the number of scores above `UNUSUAL` (hypergeometric). Both allow for the
    noise of the `n_reference` training samples that define the scale of the scores.
    """
    n, unusual = len(scores), int((scores > UNUSUAL).sum())
    result: dict[str, Any] = {"n": n, "unusual": unusual, "expected": (1 - UNUSUAL) * n}
    if not n:
        return result | {"mean": None, "p": None, "p_unusual": None}
    distance = scipy.stats.kstest(scores, "uniform", alternative="less").statistic
    high = round((1 - UNUSUAL) * n_reference)  # training samples with such a score
    total = n + n_reference, high + unusual, n
    return result | {
        "mean": float(scores.mean()),
        "p": float(np.exp(-2 * distance**2 * n * n_reference / (n + n_reference))),
        "p_unusual": float(scipy.stats.hypergeom.sf(unusual - 1, *total)),
    }


def _alarms(drift: dict[str, Any], outliers: dict[str, Any]) -> list[str]:
    """Return the tests whose result chance explains with a probability below `CHANCE / TESTS`."""
    values = {"shares": drift["p"], "outliers": outliers["p"], "unusual": outliers["p_unusual"]}
    return [name for name, p in values.items() if p is not None and p < CHANCE / TESTS]


def _sentences(about: dict[str, Any], names: dict[int, str]) -> list[str]:
    """Return what a round brought, in plain words."""
    new, outliers, alarms = about["new_clusters"], about["outliers"], about["alarms"]
    text = f"{about['joined']:,} of {about['n']:,} new pictures joined known clusters"
    if new:
        listed = ", ".join(f"{c['cluster']} ({c['size']:,} pictures)" for c in new)
        text += f"; offered as new: cluster{'s' * (len(new) > 1)} {listed}"
    sentences = [text]
    if "shares" in alarms:
        for change in about["drift"]["changed"]:
            verb = "grew" if change["now"] > change["before"] else "shrank"
            name = f" {names[change['cluster']]!r}" if change["cluster"] in names else ""
            values = [f"{100 * change[key]:.0f} %" for key in ("before", "now")]
            sentences.append(
                f"Cluster {change['cluster']}{name} {verb} from {values[0]} to {values[1]} (chance "
                f"alone: up to {100 * change['noise']:.0f} points)"
            )
        if not about["drift"]["changed"]:
            sentences.append("The shares of many clusters changed a little, more than by chance")
    if "unusual" in alarms:
        sentences.append(
            f"{outliers['unusual']:,} pictures look like nothing seen before; by chance it would "
            f"be about {outliers['expected']:.0f}"
        )
    if "outliers" in alarms:
        sentences.append(
            "The pictures are more unusual than those of the first run: their mean outlier score "
            f"is {outliers['mean']:.2f}, expected 0.50"
        )
    return sentences if alarms else [*sentences, "Nothing drifted beyond chance"]
