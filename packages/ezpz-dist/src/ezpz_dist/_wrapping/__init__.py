"""A model made ready to train on all ranks."""
