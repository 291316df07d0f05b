"""Tensor, pipeline, context and data parallelism: all that `ezpz_tp` offers, as ``ezpz.tp``.

>>> import ezpz
>>> rank = ezpz.setup_torch()
>>> ezpz.tp.initialize_tensor_parallel(tensor_parallel_size=1)
>>> ezpz.tp.get_tensor_parallel_world_size()
1
>>> ezpz.cleanup()
"""

import ezpz_tp

__all__ = ezpz_tp.__all__


def __getattr__(name: str) -> object:
    # Asked of it, not copied: some of its names are imported when they are first used.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(ezpz_tp, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
