"""Collectives that are the same under every launcher, and in a world of one."""
