"""Complete, small training scripts: ``ezpz-launch python -m ezpz.examples.NAME``."""
