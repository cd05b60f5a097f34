"""Tools around the trainer; each room on its own, and none that the trainer imports."""
