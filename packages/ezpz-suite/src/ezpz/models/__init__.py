"""Small, real models: a perceptron, Llama, a vision transformer, a diffusion transformer.

Each is plain torch. `Llama` is also built on the layers of ``ezpz_tp``, by one switch, with the
same parameters' names and the same first weights at every degree.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    # The one list of the public names: type checkers read it, and `attach` does.
    from ._errors import ModelError as ModelError
    from ._images import MLP as MLP
    from ._images import DiT as DiT
    from ._images import DiTConfig as DiTConfig
    from ._images import NoiseSchedule as NoiseSchedule
    from ._images import VisionTransformer as VisionTransformer
    from ._images import ViTConfig as ViTConfig
    from ._llama import LLAMA_SIZES as LLAMA_SIZES
    from ._llama import Llama as Llama
    from ._llama import LlamaConfig as LlamaConfig
    from ._llama import RopeScaling as RopeScaling
    from ._llama_files import huggingface_state_dict as huggingface_state_dict
    from ._llama_files import load_huggingface as load_huggingface
    from ._llama_pipeline import LlamaPipeline as LlamaPipeline
    from ._llama_pipeline import llama_pipeline as llama_pipeline
else:
    from ezpz_topo import attach

    __getattr__, __dir__ = attach(__name__)
