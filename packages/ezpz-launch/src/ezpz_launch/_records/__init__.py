"""What outlives a launch: its record, and whether it is tried again."""
