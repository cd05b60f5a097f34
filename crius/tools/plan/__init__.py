"""Which layout to use: memory and time of a step in closed form, a search over layouts, and the accuracy of both."""
