"""Megatron-LM's ``broadcast_data``: `ezpz_tp`'s own.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/data.py, 2026-08-22.
"""

from ezpz_tp._data import broadcast_data

__all__ = ["broadcast_data"]
