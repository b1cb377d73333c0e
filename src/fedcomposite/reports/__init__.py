"""Reports of runs: one page without any network, and its tables for papers."""

from fedcomposite.reports.page import write_report
from fedcomposite.reports.reading import Found, read_run

__all__ = ["Found", "read_run", "write_report"]
