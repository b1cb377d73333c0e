"""``fedcomposite cite METHOD``."""

from fedcomposite import algorithms


def cite(method: str) -> None:
    """Print the BibTeX entry of the paper that a method is from."""
    print(algorithms.cite(method))
