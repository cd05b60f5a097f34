"""Starting a run: find the place a launcher gave this process, or start local workers. No torch in here."""
