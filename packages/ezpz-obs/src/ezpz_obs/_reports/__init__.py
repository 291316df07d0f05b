"""What a run's numbers look like: reports, plots, tables for other programs."""

from .dataset import dataset_of
from .export import export
from .report import write_report
from .tail import tail
from .terminal import plot

__all__ = ["dataset_of", "export", "plot", "tail", "write_report"]
