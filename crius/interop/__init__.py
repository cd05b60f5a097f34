"""Models in the formats of other programs: torch files, DCP, safetensors."""
