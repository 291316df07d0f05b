"""What goes wrong in ezpz_obs, as one tree."""


class ObsError(Exception):
    """The parent of all errors of this package: the value, what was expected, and the remedy."""


class HistoryError(ObsError):
    """A run's file is missing or damaged, or the ranks of a run disagree about their metrics."""


class SinkError(ObsError):
    """A sink of metrics is unknown, or what it needs is not installed."""


class ReportError(ObsError):
    """A report, plot or export cannot be made of what was given."""
