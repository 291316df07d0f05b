"""Training states that survive crashes and changes of size."""
