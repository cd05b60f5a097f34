"""The mesh and what is done to a model on it. ``torch.distributed`` lives here and nowhere else."""
