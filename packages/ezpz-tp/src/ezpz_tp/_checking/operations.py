"""What torch's functions do to partial sums, by name.

A partial tensor may go through what is linear in it: f(a + b) = f(a) + f(b).
"""

from __future__ import annotations

PASSING = frozenset(
    {
        *("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "ravel", "squeeze"),
        *("unsqueeze", "transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t"),
        *("contiguous", "clone", "detach", "detach_", "expand", "expand_as", "repeat", "tile"),
        *("narrow", "select", "index_select", "gather", "take", "__getitem__", "split", "chunk"),
        *("unbind", "tensor_split", "unfold", "flip", "roll", "diagonal", "tril", "triu"),
        *("sum", "mean", "nansum", "cumsum", "trace", "neg", "negative", "positive", "__neg__"),
        *("to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "type_as", "real"),
        *("requires_grad_", "retain_grad", "broadcast_to", "broadcast_tensors"),
        *("repeat_interleave", "cat", "concat", "concatenate", "stack", "hstack", "vstack"),
        *("dstack", "masked_select", "as_strided", "alias", "split_with_sizes", "pin_memory"),
        *("H", "T", "mT", "adjoint", "take_along_dim", "copy_", "diff", "data"),
        *("__setitem__", "masked_fill", "masked_fill_", "where", "pad", "index_add", "index_add_"),
        *("index_copy", "index_copy_", "index_put", "index_put_", "scatter", "scatter_"),
        *("scatter_add", "scatter_add_", "masked_scatter", "masked_scatter_"),
        *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"),
    }
)
"""Linear in all of their tensors together, but for indices and masks: partial, if all are."""

NUMBERS = {
    **dict.fromkeys(("add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_"), (0, 1)),
    **dict.fromkeys(("subtract", "__sub__", "__rsub__", "__isub__", "rsub"), (0, 1)),
    **dict.fromkeys(("__setitem__", "masked_fill", "masked_fill_"), (2,)),
    **dict.fromkeys(("scatter", "scatter_", "pad"), (3,)),
    "where": (1, 2),
}
"""Where operations that are linear with the number zero are given it; else as other or value."""

LOOKING = frozenset({"isfinite", "isnan", "isinf"})
"""What may be asked of a partial sum too."""

FRESH = frozenset(
    {
        *("zeros_like", "empty_like", "new_zeros", "new_empty", "new_empty_strided", "zero_"),
        *("zeros", "empty", "empty_strided"),
    }
)
"""Room to be written into: its value is zero or nobody's."""

SHAPED = frozenset({"ones_like", "full_like", "new_ones", "new_full", "new_tensor", "fill_"})
"""What takes of its tensor no value."""

TAKING_AFTER = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as", "broadcast_to"})
"""What takes of its second tensor no value."""

CUTTING = frozenset(
    {
        *("narrow", "select", "__getitem__", "split", "chunk", "tensor_split", "index_select"),
        *("unbind", "split_with_sizes", "gather", "masked_select", "masked_fill"),
    }
)
"""What may take another part on each rank: of a replicated tensor, something that varies."""

ADDING = frozenset(
    {
        *("add", "add_", "__add__", "__radd__", "__iadd__"),
        *("sub", "sub_", "subtract", "__sub__", "__rsub__", "__isub__", "rsub"),
    }
)
"""Sums: partial with partial only; a whole term would be counted once a rank."""

MULTIPLYING = frozenset(
    {
        *("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"),
        *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "einsum", "linear"),
        *("outer", "inner", "tensordot", "conv1d", "conv2d", "conv3d"),
    }
)
"""Products: one partial factor, if the others are equal on all ranks."""

BIASED = frozenset({"linear", "addmm", "baddbmm", "addbmm", "addmv", "conv1d", "conv2d", "conv3d"})
"""Products of two tensors to which a third is added."""

DIVIDING = frozenset({"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"})
"""As products, for the first operand."""

SILENT = frozenset(
    {
        *("size", "dim", "numel", "nelement", "stride", "storage_offset", "is_contiguous"),
        *("is_floating_point", "is_complex", "element_size", "data_ptr", "item", "tolist"),
        *("__len__", "__repr__", "__format__", "__bool__", "__int__", "__float__", "__index__"),
        *("__hash__", "is_pinned", "is_shared", "get_device", "untyped_storage", "storage"),
        *("register_hook", "register_post_accumulate_grad_hook", "_backward_hooks", "has_names"),
        *("ndimension", "__contains__", "equal", "allclose", "is_same_size", "is_nonzero"),
        *("__reduce_ex__", "__deepcopy__", "__array__", "numpy", "is_inference", "is_set_to"),
        *("result_type", "can_cast", "__dlpack__", "record_stream", "__iter__", "is_tensor"),
    }
)
"""What returns no tensor to follow, or is asked of one."""

JUDGING = frozenset(
    {
        *("eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__"),
        *("__ge__", "isclose", "isfinite", "isnan", "isinf", "argmax", "argmin", "argsort", "sign"),
        *("bincount", "histc", "searchsorted", "bucketize", "logical_and", "logical_or", "floor"),
        *("logical_not", "logical_xor", "any", "all", "isin", "count_nonzero", "nonzero", "round"),
    }
)
"""What no gradient comes back from."""

TRANSPOSING = frozenset({"t", "T", "mT", "transpose", "adjoint", "H", "mH", "swapaxes", "swapdims"})
"""Of a matrix: they exchange its two dims."""

KEEPING_DIMS = frozenset(
    {"detach", "clone", "contiguous", "to", "float", "double", "half", "bfloat16", "type", "data"}
)
"""What leaves a weight's dims where they are."""
