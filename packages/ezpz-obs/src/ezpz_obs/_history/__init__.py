"""A run's metrics: recorded, compared between ranks, written."""

from .history import History

__all__ = ["History"]
