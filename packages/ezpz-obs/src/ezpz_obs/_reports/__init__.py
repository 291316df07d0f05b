"""What a run's numbers look like: reports, plots, tables for other programs."""

from .dataset import dataset_of
from .export import export
from .report import write_report
from .terminal import plot, tail

__all__ = ["dataset_of", "export", "plot", "tail", "write_report"]
