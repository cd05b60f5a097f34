"""Tokenizers, their files, and chat templates. No torch."""
