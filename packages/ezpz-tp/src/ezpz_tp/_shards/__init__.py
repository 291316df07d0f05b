"""Weights that change their degree: what a shard is a part of, and files of shards."""
