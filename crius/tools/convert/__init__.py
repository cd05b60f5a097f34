"""Weights in and out: ``crius import``, ``crius export`` and ``crius checkpoint convert``."""
