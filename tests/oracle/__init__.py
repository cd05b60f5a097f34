"""A plain training loop in float64, to hold one device of Crius against. Nothing here imports Crius.

``data`` turns documents and samples into batches, ``model`` a batch into logits, ``optimizers`` gradients into updates,
and ``training`` has the loop. Settings are plain numbers by the names that a user gives them.

Three things are Crius's own, and written again here from their description: the permutation that orders an epoch
(a Feistel network, ``crius/data/source.py``), the order in which samples are packed (``crius/data/samples.py``), and
the schedule (``docs/reference/settings.md``). The names of the weights and their first values come from the run.
"""
