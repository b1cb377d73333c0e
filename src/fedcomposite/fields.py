"""Types for the fields of methods and regularizers: checked at construction, and the schema of configurations."""

from fedcomposite._validation import Count, NonNegative, Positive, Probability

__all__ = ["Count", "NonNegative", "Positive", "Probability"]
