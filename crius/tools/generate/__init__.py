"""``crius generate``: prompts in, text out, from a run, a checkpoint or a folder of Hugging Face."""
