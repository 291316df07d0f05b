"""The torch device of this process, its backend, and its properties.

>>> import ezpz_device
>>> ezpz_device.get_torch_device_type(env={"TORCH_DEVICE": "cpu"})
'cpu'
>>> ezpz_device.get_torch_backend(env={"TORCH_DEVICE": "cpu"})
'gloo'
"""

from ._version import __version__ as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    # The one list of the public names: type checkers read it, and `attach` does.
    from ._backend import TORCH_DTYPES_MAP as TORCH_DTYPES_MAP
    from ._backend import as_dtype as as_dtype
    from ._backend import available_backends as available_backends
    from ._backend import get_torch_backend as get_torch_backend
    from ._backend import is_backend_available as is_backend_available
    from ._clock import Clock as Clock
    from ._clock import find_clock as find_clock
    from ._flops import count_flops as count_flops
    from ._peaks import get_peak_flops as get_peak_flops
    from ._properties import Memory as Memory
    from ._properties import get_device_properties as get_device_properties
    from ._properties import get_memory as get_memory
    from ._properties import reset_peak_memory as reset_peak_memory
    from ._select import DeviceError as DeviceError
    from ._select import get_torch_device as get_torch_device
    from ._select import get_torch_device_type as get_torch_device_type
else:
    from ezpz_topo import attach

    __getattr__, __dir__ = attach(__name__)
