"""Faults that a user plants, and what they do."""
