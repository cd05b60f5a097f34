"""Measurements on this machine: which optimizer and which low-precision format are worthwhile."""
