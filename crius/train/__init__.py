"""The training job: parts assembled, the loop, one step, validation."""
