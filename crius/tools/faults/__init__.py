"""Faults that a user plants, and their effects."""
