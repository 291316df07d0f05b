"""What ezpz_launch has ``ezpz doctor`` look at: MPI, room for files, versions on other hosts."""
