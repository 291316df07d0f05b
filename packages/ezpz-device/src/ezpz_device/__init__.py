"""Which torch device this process uses, and which backend goes with it, and what it can do.

>>> import ezpz_device
>>> ezpz_device.get_torch_device_type(env={"TORCH_DEVICE": "cpu"})
'cpu'
>>> ezpz_device.get_torch_backend(env={"TORCH_DEVICE": "cpu"})
'gloo'
"""

from ._backend import (
    TORCH_DTYPES_MAP,
    as_dtype,
    available_backends,
    get_torch_backend,
    is_backend_available,
)
from ._clock import Clock, find_clock
from ._errors import DeviceError
from ._peaks import get_peak_flops
from ._properties import Memory, get_device_properties, get_memory, reset_peak_memory
from ._select import get_torch_device, get_torch_device_type
from ._version import __version__

__all__ = [
    "TORCH_DTYPES_MAP",
    "Clock",
    "DeviceError",
    "Memory",
    "__version__",
    "as_dtype",
    "available_backends",
    "find_clock",
    "get_device_properties",
    "get_memory",
    "get_peak_flops",
    "get_torch_backend",
    "get_torch_device",
    "get_torch_device_type",
    "is_backend_available",
    "reset_peak_memory",
]
