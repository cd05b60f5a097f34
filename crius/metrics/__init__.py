"""What a run reports, and where it goes."""
