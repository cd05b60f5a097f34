"""What pays on a CPU alone, in one folder: faster paths of operators, the heap, and what inductor is told.

The function that models call is in the file of its fast path, which it takes where it may; elsewhere it is PyTorch's.
What each part gains is in docs/kernels.md.
"""
