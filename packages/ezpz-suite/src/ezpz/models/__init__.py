"""Small, real models: a perceptron, Llama, a vision transformer, a diffusion transformer.

Each is plain torch. `Llama` is also built on the layers of ``ezpz_tp``, by one switch, with the
same parameters' names and the same first weights at every degree:

>>> from ezpz.models import Llama, LlamaConfig
>>> model = Llama(LlamaConfig(vocab_size=256, dim=64, layers=2, heads=4))
>>> model.config.parameters()
164160
"""

from typing import TYPE_CHECKING

from ezpz._names import unknown

if TYPE_CHECKING:
    from ._dit import DiT, DiTConfig, NoiseSchedule
    from ._errors import ModelError
    from ._llama import LLAMA_SIZES, Llama, LlamaConfig, RopeScaling
    from ._llama_files import huggingface_state_dict, load_huggingface
    from ._llama_pipeline import LlamaPipeline, llama_pipeline
    from ._mlp import MLP
    from ._vit import VisionTransformer, ViTConfig

_HOMES = {
    "DiT": "_dit",
    "DiTConfig": "_dit",
    "LLAMA_SIZES": "_llama",
    "Llama": "_llama",
    "LlamaConfig": "_llama",
    "LlamaPipeline": "_llama_pipeline",
    "MLP": "_mlp",
    "ModelError": "_errors",
    "NoiseSchedule": "_dit",
    "RopeScaling": "_llama",
    "ViTConfig": "_vit",
    "VisionTransformer": "_vit",
    "huggingface_state_dict": "_llama_files",
    "llama_pipeline": "_llama_pipeline",
    "load_huggingface": "_llama_files",
}

__all__ = [
    "LLAMA_SIZES",
    "MLP",
    "DiT",
    "DiTConfig",
    "Llama",
    "LlamaConfig",
    "LlamaPipeline",
    "ModelError",
    "NoiseSchedule",
    "RopeScaling",
    "ViTConfig",
    "VisionTransformer",
    "huggingface_state_dict",
    "llama_pipeline",
    "load_huggingface",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise unknown(__name__, name, _HOMES)
    from importlib import import_module  # noqa: PLC0415  # importing this loads nothing

    value: object = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
