"""Parts that pay on a CPU only: faster paths of operators, settings of the heap, and settings of inductor.

Models call the function in the file of the fast path. It takes the fast path where it can, else PyTorch's. The gain of
each part is in docs/kernels.md.
"""
