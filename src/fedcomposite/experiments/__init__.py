"""Experiments: configuration, runs on disk, plots."""

from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.experiments.runner import compare, execute
from fedcomposite.experiments.store import RunFolder, StoreError

__all__ = ["Config", "ConfigError", "RunFolder", "StoreError", "compare", "execute"]
