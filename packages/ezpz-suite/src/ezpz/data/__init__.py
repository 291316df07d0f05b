"""Real data for training, each rank reading its own part: digits, text as tokens, loaders."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    # The one list of the public names: type checkers read it, and `attach` does.
    from ._digits import digits as digits
    from ._loader import loader_options as loader_options
    from ._tokens import TokenBlocks as TokenBlocks
    from ._tokens import TokenHeader as TokenHeader
    from ._tokens import huggingface_texts as huggingface_texts
    from ._tokens import python_sources as python_sources
    from ._tokens import read_header as read_header
    from ._tokens import text_files as text_files
    from ._tokens import write_tokens as write_tokens
    from ._tokens import write_tokens_once as write_tokens_once
else:
    from ezpz_topo import attach

    __getattr__, __dir__ = attach(__name__)
