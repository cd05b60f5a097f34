"""Starting a run: finds the place that a launcher gave this process, or starts local workers. No torch in here."""
