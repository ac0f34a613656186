"""What people decided about the clusters of a finished run: `curation.jsonl` and its effects."""

from ssl_kd.workbench.decisions.curation import Curation

__all__ = ["Curation"]
