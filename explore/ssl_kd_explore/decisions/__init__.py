"""Decisions of people about the clusters of a finished run, stored in `curation.jsonl`."""

from ssl_kd_explore.decisions.curation import Curation
from ssl_kd_explore.decisions.decided import decided
from ssl_kd_explore.decisions.line_format import schema

__all__ = ["Curation", "decided", "schema"]
