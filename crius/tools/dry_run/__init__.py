"""Cost of a layout before anything is allocated: the dry run takes the real code through a step of fake tensors."""
