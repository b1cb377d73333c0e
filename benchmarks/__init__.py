"""Measurements: workloads against other frameworks, proxes against a copy, and what single parts cost."""
