"""A model split by its layers over the ranks of a pipeline."""
