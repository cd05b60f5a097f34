"""Proofs for anyone to run: every layout trains one curve, starts from the same bits, and compiling keeps them."""
