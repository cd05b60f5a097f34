"""Turns documents into tokens and batches. Only ``loader`` imports torch, so bad data is found before workers start."""
