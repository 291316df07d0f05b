"""Looking at a running job: a debugger, timers, the slowest rank, what set-up decided."""
