"""The nodes of a job: attempts on them, bad ones, preflight, staging."""
