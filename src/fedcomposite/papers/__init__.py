"""The papers' figures and tables as experiments with verdicts: one TOML and one short file of claims for each name.

``fedcomposite reproduce NAME`` runs it, resumes it, and leaves ``figure.pdf``, ``figure.png``, ``data.csv`` and
``verdict.md``. Claims and figures are functions of ``data.csv`` alone.
"""

from fedcomposite.papers.base import Paper, load, names
from fedcomposite.papers.measuring import Study
from fedcomposite.papers.report import write_report
from fedcomposite.papers.reproduce import Reproduced, check, reproduce
from fedcomposite.papers.verdicts import Claim

__all__ = ["Claim", "Paper", "Reproduced", "Study", "check", "load", "names", "reproduce", "write_report"]
