"""Audit of a run: each sample was trained on exactly once."""
