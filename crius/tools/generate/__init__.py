"""``crius generate``: prompts in, text out, from a run, a checkpoint or a Hugging Face folder."""
