"""Models in the formats of others: torch files, DCP, safetensors."""
