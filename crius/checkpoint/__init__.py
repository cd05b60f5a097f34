"""Checkpoints: the format on disk, and saving into and loading from it."""
