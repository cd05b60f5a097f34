"""Operators with a faster path than PyTorch's own. Paths that pay on a CPU only are in ``cpu``.

The public function of an operator picks the path. The paths that a process may take are chosen once, see ``choice.py``.
The gain of each path is in docs/kernels.md.
"""
