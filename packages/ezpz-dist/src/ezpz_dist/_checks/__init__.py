"""What ezpz_dist has ``ezpz doctor`` look at: two ranks that reduce."""
