"""Checkpoints: the format on disk, saving and loading."""
