"""The arithmetic of sharded products: placements in, placements and collectives out."""
