"""Low-precision matmuls: which device has them, and linear layers that use them. torchao is the backend."""
