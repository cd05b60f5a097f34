"""Crius: a PyTorch-native platform for training large language models."""

__version__ = "0.1.0"
