"""Tools around the trainer. Each room stands alone, and the trainer imports none of them."""
