"""Decisions of people about the clusters of a finished run, stored in `curation.jsonl`."""

from ssl_kd.workbench.decisions.curation import Curation
from ssl_kd.workbench.decisions.line_format import schema

__all__ = ["Curation", "schema"]
