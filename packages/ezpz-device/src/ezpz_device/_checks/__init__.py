"""What ezpz_device has ``ezpz doctor`` look at: the accelerator."""
