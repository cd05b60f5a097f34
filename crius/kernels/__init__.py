"""Operators with a faster path than PyTorch's own; those that pay on a CPU alone are in ``cpu``.

The public function of an operator picks. Which paths a process may take is chosen once, see ``choice.py``; what a path
gains is in docs/kernels.md.
"""
