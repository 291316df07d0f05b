"""Design and check shardings: types of tensors, a calculator, pictures of tensors and meshes.

    import ezpz_spmd

    with ezpz_spmd.check(model):     # a missing reduction is an error at its line
        loss(model(tokens)).backward()

`einsum_sharding` says where the result and the gradients of a product are and what is sent,
`draw_tensor` draws a tensor of any number of dims as a matrix of matrices, and `describe_mesh`
prints a mesh as a table, with a warning where groups cross nodes.
"""

from ._check import check, declare_type, type_of
from ._describe import Description, describe_mesh
from ._draw import draw_tensor
from ._errors import ParallelTypeError
from ._sharding import EinsumSharding, einsum_sharding

__version__ = "0.1.0"

__all__ = [
    "Description",
    "EinsumSharding",
    "ParallelTypeError",
    "__version__",
    "check",
    "declare_type",
    "describe_mesh",
    "draw_tensor",
    "einsum_sharding",
    "type_of",
]
