"""The error of the models."""


class ModelError(ValueError):
    """Sizes that do not fit, or weights of another model."""
