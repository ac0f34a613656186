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
ALARM = CHANCE / 3  # largest p-value of an alarm; a round has three tests
DESCRIBED = 100  # rounds, the newest ones
UNUSUAL = 0.99  # outlier score that 1 % of ordinary samples exceed
MIN_EXPECTED = 5  # samples that the chi-squared test expects in a cluster; smaller ones are pooled
TYPICAL = 12  # pictures that represent a new cluster, or the unusual ones


def describe_rounds(samples: Samples) -> list[dict[str, Any]]:
    """Describe the newest rounds of a run (split `train`, `extend1`, ...) and their drift.

    Shares and names are those of the clusters after all decisions; a new cluster has the number
    under which it was offered.
    """
    curation = Curation(samples)
    splits = [rows for name, rows in samples.splits.items() if name != "test"]
    rounds = [np.arange(rows.start, rows.stop) for rows in splits]
    numbers, first = np.unique(samples.column("cluster"), return_index=True)
    first_rows = np.full(max(numbers.max(), samples.config["n_clusters"]) + 1, -1)
    added = numbers >= samples.config["n_clusters"]  # after the training
    first_rows[numbers[added]] = first[added]
    described = range(max(1, len(rounds) - DESCRIBED + 1), len(rounds) + 1)
    return [_describe(samples, curation, rounds[:n], first_rows) for n in described]


def _describe(
    samples: Samples, curation: Curation, rounds: list[NDArray], first_rows: NDArray
) -> dict[str, Any]:
    """Describe the last of the rounds, given as row numbers.

    `first_rows` has the first row of each cluster that was added after the training, else -1.
    """
    *earlier, rows = rounds
    assigned, clusters, names = samples.column("cluster"), curation.clusters, curation.names
    confidence, n_trained = samples.column("confidence"), samples.config["n_clusters"]
    is_new = first_rows[assigned[rows]] >= rows[0]
    joined = rows[~is_new]
    about: dict[str, Any] = {"round": len(rounds), "n": len(rows), "joined": len(joined)}
    about["confidence"], about["new_clusters"] = float(confidence[rows].mean()), []
    for k in np.unique(assigned[rows][is_new]).tolist():
        members = rows[assigned[rows] == k]
        cluster = {"cluster": k, "name": names.get(k, ""), "size": len(members)}
        about["new_clusters"].append(cluster | _first(samples, members, confidence))
    numbers, counts = np.unique(clusters[rows][clusters[rows] >= 0], return_counts=True)
    about["shares"] = dict(zip(numbers.tolist(), (counts / counts.sum()).tolist(), strict=True))
    if not earlier:
        text = f"{len(rows):,} pictures in {len(numbers)} clusters"
        return about | {"alarms": [], "sentences": [text]}

    enough = next(
        (n for n in range(1, len(earlier)) if sum(map(len, earlier[-n:])) >= len(rows)), 0
    )
    recent = np.concatenate(earlier[-enough:])
    about["drift"] = compare_shares(clusters[recent], clusters[joined])
    about["drift_since_first"] = compare_shares(clusters[earlier[0]], clusters[joined])
    # The scores in added clusters are not comparable: there, only the nearest samples count.
    ordinary, outlier = joined[assigned[joined] < n_trained], samples.column("outlier")
    about["outliers"] = compare_outliers(outlier[ordinary], min(len(earlier[0]), REFERENCE_ROWS))
    unusual = ordinary[outlier[ordinary] > UNUSUAL]
    about["outliers"] |= _first(samples, unusual, outlier)
    p_values = {"shares": about["drift"]["p"], "outliers": about["outliers"]["p"]}
    p_values["unusual"] = about["outliers"]["p_unusual"]
    about["alarms"] = [name for name, p in p_values.items() if p is not None and p < ALARM]
    return about | {"sentences": _sentences(about, names)}


def _first(samples: Samples, rows: NDArray, scores: NDArray) -> dict[str, Any]:
    """Return the rows with the highest scores, and their files."""
    first = rows[np.argsort(-scores[rows], kind="stable")[:TYPICAL]]
    return {"rows": first.tolist(), "files": samples.table.column("file").take(first).to_pylist()}


def compare_shares(before: NDArray, now: NDArray) -> dict[str, Any]:
    """Test whether two groups of samples `[n]` are distributed alike over the clusters.

    `p` is that of the chi-squared test of homogeneity, in which clusters with few expected samples
    are pooled. `changed` lists clusters whose share changed by more than `noise`, a bound that
    chance exceeds in any cluster with probability `ALARM` (normal approximation, Bonferroni).
    """
    before, now = before[before >= 0], now[now >= 0]
    if not len(before) or not len(now):
        return {"p": None, "changed": []}
    size = 1 + max(before.max(), now.max())
    counts = np.stack([np.bincount(x, minlength=size) for x in (before, now)])
    numbers = np.flatnonzero(counts.any(0))
    counts = counts[:, numbers]
    sizes, total = counts.sum(1, keepdims=True), counts.sum(0)
    small = total * sizes.min() / sizes.sum() < MIN_EXPECTED
    table = np.c_[counts[:, ~small], counts[:, small].sum(1)]
    table = table[:, table.any(0)]
    p = scipy.stats.chi2_contingency(table, correction=False).pvalue if table.shape[1] > 1 else None
    share, (old, new) = total / sizes.sum(), counts / sizes
    deviations = scipy.stats.norm.isf(ALARM / 2 / len(numbers))
    noise = deviations * np.sqrt(share * (1 - share) * (1 / sizes).sum())
    values = zip(numbers.tolist(), old.tolist(), new.tolist(), noise.tolist(), strict=True)
    changed = [dict(zip(("cluster", "before", "now", "noise"), v, strict=True)) for v in values]
    changed = [c for c in changed if abs(c["now"] - c["before"]) > c["noise"]]
    changed.sort(key=lambda c: -abs(c["now"] - c["before"]))
    return {"p": None if p is None else float(p), "changed": changed}


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
                f"Cluster {change['cluster']}{name} {verb} from {values[0]} to {values[1]} of the "
                f"joined pictures (chance alone: up to {100 * change['noise']:.0f} points)"
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
