"""``python -m fedcomposite``."""

from fedcomposite.cli import main

main()
