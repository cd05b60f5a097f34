"""Conversations for training: reading them, rendering them by a chat template, and choosing the target tokens."""
