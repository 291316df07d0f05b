"""What is wrong with a parallel program, said before it costs a run: types, and equal values."""
