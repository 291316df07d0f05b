"""Topology and request in, plan and command line out: pure, but for looking at PATH and ports."""
