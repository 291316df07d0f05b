"""``ezpz test``: a real training on all ranks, and how fast the ranks talk to each other."""
