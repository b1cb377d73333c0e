"""Callbacks: what is done after each record, as ``from fedcomposite.callbacks import EarlyStopping`` finds it.

They live in :mod:`fedcomposite.runtime.callbacks`; this is the short name, with the same objects.
"""

from fedcomposite.runtime.callbacks import *  # noqa: F403
from fedcomposite.runtime.callbacks import __all__ as __all__
