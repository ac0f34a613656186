"""Write the report of a clustering run, one page that opens offline."""

from ssl_kd.vision.report.decided import Decided
from ssl_kd.vision.report.gallery import run_samples
from ssl_kd.vision.report.write import reported, write_report

__all__ = ["Decided", "reported", "run_samples", "write_report"]
