"""What `ezpz_tp.parallel_state` is made of: Megatron-LM's names over one state."""
