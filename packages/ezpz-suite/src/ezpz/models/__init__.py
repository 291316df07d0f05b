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
    from ._dit import DiT, DiTConfig
    from ._errors import ModelError
    from ._llama.config import LlamaConfig, RopeScaling
    from ._llama.model import Llama
    from ._llama.pipeline import LlamaPipeline, llama_pipeline
    from ._llama.sizes import LLAMA_SIZES
    from ._llama.weights import huggingface_state_dict, load_huggingface
    from ._mlp import MLP
    from ._noise import NoiseSchedule
    from ._vit import VisionTransformer, ViTConfig

_HOMES = {
    "DiT": "_dit",
    "DiTConfig": "_dit",
    "LLAMA_SIZES": "_llama.sizes",
    "Llama": "_llama.model",
    "LlamaConfig": "_llama.config",
    "LlamaPipeline": "_llama.pipeline",
    "MLP": "_mlp",
    "ModelError": "_errors",
    "NoiseSchedule": "_noise",
    "RopeScaling": "_llama.config",
    "ViTConfig": "_vit",
    "VisionTransformer": "_vit",
    "huggingface_state_dict": "_llama.weights",
    "llama_pipeline": "_llama.pipeline",
    "load_huggingface": "_llama.weights",
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
