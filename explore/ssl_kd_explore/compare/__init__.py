"""Compare the clusters of two runs: where they differ, and which are better."""

from ssl_kd_explore.compare.judgement import judge
from ssl_kd_explore.compare.page import summary, write_comparison
from ssl_kd_explore.compare.runs import compare_runs

__all__ = ["compare_runs", "judge", "summary", "write_comparison"]
