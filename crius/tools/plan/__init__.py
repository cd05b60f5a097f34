"""Which layout to take: memory and time of a step in closed form, a search over layouts, and how far to trust it."""
