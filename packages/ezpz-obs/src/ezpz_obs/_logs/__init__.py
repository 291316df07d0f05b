"""Logs that name their rank, join the standard library's, and never end a training."""

from .bullets import log_dict_as_bulleted_list
from .levels import get_log_level
from .logger import get_logger
from .progress import progress
from .setup import LogSetup, configure_logs

__all__ = [
    "LogSetup",
    "configure_logs",
    "get_log_level",
    "get_logger",
    "log_dict_as_bulleted_list",
    "progress",
]
