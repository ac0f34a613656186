"""What people decided about the clusters of a run, as its report shows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TYPICAL = 8  # samples of a cluster


@dataclass(frozen=True)
class Decided:
    """The clusters of a run after all decisions of its `curation.jsonl`.

    Attributes:
        clusters: number of the cluster of each sample that the report shows, int64 `[n]`; -1 for
            excluded samples.
        names: number -> name, for the clusters that have a name.
        lines: the decisions, oldest first, as `Curation.lines` has them.
    """

    clusters: NDArray[np.int64]
    names: Mapping[int, str]
    lines: Sequence[Mapping[str, Any]]

    @property
    def sizes(self) -> dict[int, int]:
        """Number of samples of each cluster that has some."""
        numbers, counts = np.unique(self.clusters[self.clusters >= 0], return_counts=True)
        return dict(zip(numbers.tolist(), counts.tolist(), strict=True))

    def typical(self, confidence: NDArray[np.floating]) -> dict[int, list[int]]:
        """Return the rows of the most confident samples of each cluster, best first."""
        order = np.argsort(-confidence, kind="stable")
        return {k: order[self.clusters[order] == k][:TYPICAL].tolist() for k in self.sizes}

    def on_map(self, rows: NDArray[np.int64] | None, shown: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the clusters `[m]` of the map's points: of its `rows`, of all, or as `shown`."""
        if rows is not None:
            return self.clusters[rows]
        return self.clusters if len(self.clusters) == len(shown) else shown

    @property
    def summary(self) -> str:
        """One sentence on how many decisions there are, and what they left."""
        active = [line for line in self.lines if not line["undone"] and line["do"] != "undo"]
        if not active:
            return ""
        plural = "s" if len(active) > 1 else ""
        text = f"After {len(active):,} decision{plural}: {len(self.sizes):,} clusters"
        excluded = int((self.clusters < 0).sum())
        return f"{text}, {excluded:,} samples excluded." if excluded else f"{text}."

    def history(self) -> list[dict[str, Any]]:
        """Return time, person, text and `undone` of each decision, newest first."""
        return [
            {
                "time": line["time"],
                "by": line.get("by", ""),
                "text": _sentence(line),
                "undone": line["undone"],
            }
            for line in reversed(self.lines)
            if line["do"] != "undo"
        ]


def _sentence(line: Mapping[str, Any]) -> str:
    """Return what a decision does, in words."""
    n = len(line.get("rows", ()))
    samples = f"{n:,} sample{'s' if n != 1 else ''}"
    name, into = line.get("name"), line.get("into", line.get("new"))
    called = f", called {name}" if name else ""
    texts = {
        "rename": f"cluster {line.get('cluster')} is called {name}"
        if name
        else f"cluster {line.get('cluster')} has no name",
        "merge": f"clusters {', '.join(map(str, line.get('clusters', ())))} merged{called}",
        "split": f"{samples} of cluster {line.get('cluster')} are cluster {into}{called}"
        if n
        else f"cluster {line.get('cluster')} split in {len(line.get('parts', ())) + 1}",
        "move": f"{samples} moved to cluster {into}{called}",
        "exclude": f"{samples} excluded",
        "check": f"{samples} checked",
    }
    return texts[line["do"]]
