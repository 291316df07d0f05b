"""A run's file: one JSON object a line, readable whatever ended its writer."""

from .reader import Block, Run, follow, read_run

__all__ = ["Block", "Run", "follow", "read_run"]
