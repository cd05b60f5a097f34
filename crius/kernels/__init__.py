"""Operators with a faster path than PyTorch's own, one a file: ``reference``, the fast path, ``when`` it is taken.

The public function of a file picks. Which paths a process may take is chosen once, see ``choice.py``; what a path gains
is in docs/kernels.md.
"""
