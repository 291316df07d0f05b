"""Every rank its own share of the data."""
