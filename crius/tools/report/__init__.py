"""Reports, lists and comparisons of runs, read from their folders."""
