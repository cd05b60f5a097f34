"""Documents to tokens to batches. Only ``batch`` and ``loader`` import torch: bad data is found before workers are."""
