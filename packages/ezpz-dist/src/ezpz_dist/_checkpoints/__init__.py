"""Checkpoints that survive crashes and changes of size."""
