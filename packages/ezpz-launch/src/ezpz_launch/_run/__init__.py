"""One run of a plan: its processes, its output, its end."""
