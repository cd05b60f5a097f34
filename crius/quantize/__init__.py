"""Low-precision matmuls: a check of the device, and linear layers that use them. torchao is the backend."""
