"""Small, real models: a perceptron, Llama, a vision transformer, a diffusion transformer.

Each is plain torch. `Llama` is also built on the layers of ``ezpz_tp``, by one switch, with the
same parameters' names and the same first weights at every degree:

>>> from ezpz.models import Llama, LlamaConfig
>>> model = Llama(LlamaConfig(vocab_size=256, dim=64, layers=2, heads=4))
>>> model.config.parameters()
164160
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    # The one list of the public names: type checkers read it, and `attach` does.
    from ._dit import DiT as DiT
    from ._dit import DiTConfig as DiTConfig
    from ._dit import NoiseSchedule as NoiseSchedule
    from ._errors import ModelError as ModelError
    from ._llama import LLAMA_SIZES as LLAMA_SIZES
    from ._llama import Llama as Llama
    from ._llama import LlamaConfig as LlamaConfig
    from ._llama import RopeScaling as RopeScaling
    from ._llama_files import huggingface_state_dict as huggingface_state_dict
    from ._llama_files import load_huggingface as load_huggingface
    from ._llama_pipeline import LlamaPipeline as LlamaPipeline
    from ._llama_pipeline import llama_pipeline as llama_pipeline
    from ._mlp import MLP as MLP
    from ._vit import VisionTransformer as VisionTransformer
    from ._vit import ViTConfig as ViTConfig
else:
    from ezpz._names import attach

    __getattr__, __dir__ = attach(__name__)
