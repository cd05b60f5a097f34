"""Layers that models share."""
