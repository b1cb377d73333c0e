"""What an analyst calls: the answer to a problem, with a certificate."""

from fedcomposite.estimators.certify import certify
from fedcomposite.estimators.solve import path, solve

__all__ = ["certify", "path", "solve"]
