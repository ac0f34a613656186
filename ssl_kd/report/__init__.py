"""What people see of a run: one page that opens offline."""

from ssl_kd.report.write import write_report

__all__ = ["write_report"]
