"""Adapters, one script per framework; each runs in that framework's own environment."""
