"""Which ranks belong together, and the process groups they make."""
