"""Experiments: configuration, runs on disk, comparisons."""

from fedcomposite.experiments.comparison import compare
from fedcomposite.experiments.config import Config, ConfigError
from fedcomposite.experiments.runner import execute
from fedcomposite.experiments.store import RunFolder, StoreError
from fedcomposite.experiments.sweeps import Sweep
from fedcomposite.locks import FolderLock, LockedError

__all__ = [
    "Config",
    "ConfigError",
    "FolderLock",
    "LockedError",
    "RunFolder",
    "StoreError",
    "Sweep",
    "compare",
    "execute",
]
