"""Llama, plain or parallel."""
