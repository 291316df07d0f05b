"""A command line in, the truth about how it ended out: the only place that starts processes."""
