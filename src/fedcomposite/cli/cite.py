"""``fedcomposite cite METHOD``."""

from fedcomposite import algorithms
from fedcomposite.cli.console import reporting
from fedcomposite.registry import RegistryError


def cite(method: str) -> None:
    """Print the BibTeX entry of the paper that a method is from."""
    with reporting((RegistryError,)):
        print(algorithms.cite(method))
