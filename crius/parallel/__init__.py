"""The mesh, and the passes that lay a model out on it. ``torch.distributed`` is used in this package only."""
