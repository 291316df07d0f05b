"""Real data for training, each rank reading its own part: digits, text as tokens, loaders."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    # The one list of the public names: type checkers read it, and `attach` does.
    from ._digits import digits as digits
    from ._loader import loader_options as loader_options
    from ._text_files import python_sources as python_sources
    from ._text_files import text_files as text_files
    from ._tokens import TokenBlocks as TokenBlocks
    from ._tokens import write_tokens as write_tokens
else:
    from ezpz_topo import attach

    __getattr__, __dir__ = attach(__name__)
