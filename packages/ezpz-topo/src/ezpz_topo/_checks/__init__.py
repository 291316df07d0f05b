"""What ezpz_topo has ``ezpz doctor`` look at: the scheduler, the hostfile, the network."""
