"""Models as plain single-device PyTorch, and their torch-free descriptions. No config section and no mesh is used."""
