"""``crius evaluate``: multiple choice and bits per byte of a run, a checkpoint or a Hugging Face folder."""
