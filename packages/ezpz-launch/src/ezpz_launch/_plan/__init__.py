"""What would run: options, placement, launchers, and the plan made of them."""
