"""Types for the fields of methods and regularizers: checked at construction, and the schema of configurations."""

from fedcomposite._validation import Count, Positive, Probability, ZeroOrMore

__all__ = ["Count", "Positive", "Probability", "ZeroOrMore"]
