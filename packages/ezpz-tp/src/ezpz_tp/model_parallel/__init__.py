"""fairscale's ``fairscale.nn.model_parallel``: its names, arguments and return values.

One implementation lies beneath, that of `ezpz_tp`. What fairscale calls model parallel is
tensor parallel.

Source: facebookresearch/fairscale fairscale/nn/model_parallel/__init__.py, 2025-04-26.
"""

from . import cross_entropy, initialize, layers, mappings, random
from .cross_entropy import *  # noqa: F403 - all of it, by intention
from .initialize import *  # noqa: F403
from .layers import *  # noqa: F403
from .mappings import *  # noqa: F403
from .random import *  # noqa: F403

__all__: list[str] = []
__all__ += cross_entropy.__all__
__all__ += initialize.__all__
__all__ += layers.__all__
__all__ += mappings.__all__
__all__ += random.__all__
