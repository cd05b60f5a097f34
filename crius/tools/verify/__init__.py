"""Proofs that anyone can run: every layout has the same curve and the same first bits, and compiling keeps the
curve."""
