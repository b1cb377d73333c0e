"""Types for the fields of methods and regularizers: they are checked at construction and are the configuration schema."""

from fedcomposite._validation import Count, NonNegative, Positive, Probability

__all__ = ["Count", "NonNegative", "Positive", "Probability"]
