"""Conversations to train on: what files hold, the text that a chat template makes, and which tokens are targets."""
