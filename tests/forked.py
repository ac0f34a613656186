"""Prepare the process that `tests.processes` forks others from; to be imported last."""

from ssl_kd.core.runs.folder import versions
from tests import frozen
from tests.reuse import equal_results_are_reused

__all__ = ["frozen", "reused"]

reused = equal_results_are_reused()
reused.__enter__()  # until the process ends
versions()
