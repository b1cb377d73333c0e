"""What an analyst calls: the answer to a problem, with a certificate."""

from fedcomposite.estimators.crossvalidate import CrossValidation, cross_validate, fold_of_samples, refit
from fedcomposite.estimators.paths import Path, path
from fedcomposite.estimators.solve import solve
from fedcomposite.runtime.certificate import certify

__all__ = ["CrossValidation", "Path", "certify", "cross_validate", "fold_of_samples", "path", "refit", "solve"]
