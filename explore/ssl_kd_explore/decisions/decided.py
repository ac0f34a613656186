"""Apply the decisions of a run to the samples that its report shows."""

from __future__ import annotations

from pathlib import Path

from ssl_kd.vision.report import Decided
from ssl_kd.vision.samples import Samples
from ssl_kd_explore.decisions.curation import Curation


def decided(path: Path) -> Decided:
    """Return the clusters, names and decisions of the split that the report of a run shows.

    Raises:
        CorruptFileError: a line of `curation.jsonl` is damaged or was edited.
    """
    samples = Samples(path)
    curation = Curation(samples)
    split = (samples.metrics.get("extended") or {}).get("split", "train")
    rows = samples.splits[split]
    clusters = curation.clusters[rows.start : rows.stop]
    return Decided(clusters, curation.names, curation.lines)
