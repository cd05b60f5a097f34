"""Reports of a run, and their destinations."""
