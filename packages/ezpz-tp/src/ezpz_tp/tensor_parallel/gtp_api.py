"""What Megatron-LM asks before it shards weights once more: not here.

Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/gtp_api.py, 2026-08-22.
"""

from __future__ import annotations

__all__ = ["HAVE_GTP"]

HAVE_GTP = False
"""Read before any other name of Megatron-LM's module is used."""
