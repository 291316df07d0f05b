"""What a job of 10,080 nodes asks of this code, measured as far as one machine can, or modelled."""
