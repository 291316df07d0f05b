"""Libraries whose INFO and DEBUG say nothing about a training."""

from __future__ import annotations

import logging
from collections.abc import Callable

TAMED = (
    "absl", "aiohttp", "alembic", "asyncio", "azure", "boto3", "botocore", "datasets", "filelock",
    "fontTools", "fsspec", "git", "google", "grpc", "h5py", "httpcore", "httpx",
    "huggingface_hub", "jax", "markdown_it", "matplotlib", "mlflow", "multipart", "numba",
    "openai", "parso", "PIL", "requests", "s3fs", "s3transfer", "sentry_sdk", "sqlalchemy",
    "tensorboard", "tensorflow", "triton", "urllib3", "wandb",
)  # fmt: skip
"""Loggers that speak from WARNING, unless somebody has given them a level."""

OURS = ("ezpz", "ezpz_device", "ezpz_dist", "ezpz_launch", "ezpz_obs", "ezpz_topo", "ezpz_tp")
"""Loggers that speak from our own level, unless somebody has given them one."""


def give_level(logger: logging.Logger, level: int) -> Callable[[], None]:
    """Give a logger a level; return what takes it back, unless somebody has changed it since."""
    before = logger.level
    logger.setLevel(level)

    def undo() -> None:
        if logger.level == level:
            logger.setLevel(before)

    return undo
