"""Layers of which each rank holds a part, and how that part is made."""
