"""Whether each sample was trained on exactly once."""
