"""The version of the package, in one place."""

__version__ = "0.2.0"
SCHEMA = 1
"""The version of what commands print as JSON, and of ``analysis.json``: it counts up when a key changes (json.md)."""
