"""What an analyst calls: the answer to a problem, with a certificate."""

from fedcomposite.estimators.solve import path, solve
from fedcomposite.runtime.certificate import certify

__all__ = ["certify", "path", "solve"]
