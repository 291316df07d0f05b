"""Collectives, and the autograd functions where sharded and replicated code meet."""
