"""What a run did, read from its folder: reports, lists of runs, comparisons."""
