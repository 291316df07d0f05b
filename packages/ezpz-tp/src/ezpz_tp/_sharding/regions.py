"""Which of this package's region functions brings a tensor from one place to another."""

from __future__ import annotations

from .placement import conversion


def calls(
    name: str, letters: str, source: str, target: str, gradient: str, back: str
) -> tuple[str, ...]:
    """Return the calls to write: none, one, or two for a sum that sharded code then shares.

    Args:
        name: Of the tensor.
        letters: One for each of its dims.
        source: Where the tensor is along the tensor axis.
        target: Where it shall be.
        gradient: Where the gradient of the result is.
        back: Where the gradient of the tensor shall be.
    """
    forward, backward = conversion(source, target), conversion(gradient, back)
    copy = (f"copy_to_tensor_parallel_region({name})",) if backward == "all-reduce" else ()
    if forward is None:
        return copy
    if forward == "all-reduce":
        return f"reduce_from_tensor_parallel_region({name})", *copy
    if forward == "all-to-all":
        gathered, split = letters.index(source), letters.index(target)
        return (f"sequence_to_head({name}, sequence_dim={gathered}, head_dim={split})",)
    dim = letters.index(source if forward == "all-gather" else target)
    last = dim == len(letters) - 1
    function = _FUNCTIONS[forward, backward or "", last]
    arguments = [name]
    if "sequence" in function:
        if (forward, backward) == ("all-gather", "slice"):
            arguments.append("tensor_parallel_output_grad=False")
        if dim:
            arguments.append(f"dim={dim}")
    return (f"{function}({', '.join(arguments)})",)


_FUNCTIONS = {
    # forward, backward, whether along the last dim
    ("slice", "all-gather", True): "scatter_to_tensor_parallel_region",
    ("slice", "all-gather", False): "scatter_to_sequence_parallel_region",
    ("all-gather", "slice", True): "gather_from_tensor_parallel_region",
    ("all-gather", "slice", False): "gather_from_sequence_parallel_region",
    ("all-gather", "reduce-scatter", True): "all_gather_last_dim_from_tensor_parallel_region",
    ("all-gather", "reduce-scatter", False): "gather_from_sequence_parallel_region",
    ("reduce-scatter", "all-gather", True): "reduce_scatter_last_dim_to_tensor_parallel_region",
    ("reduce-scatter", "all-gather", False): "reduce_scatter_to_sequence_parallel_region",
}
