"""The error tree of ezpz_device."""

from __future__ import annotations


class DeviceError(Exception):
    """A device or backend was requested that this process cannot use."""
