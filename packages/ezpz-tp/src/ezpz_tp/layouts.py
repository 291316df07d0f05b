"""Meshes in use, as data: the axes of each, what an axis shards and sends, and when to use it.

    from ezpz_tp import layouts, make_mesh

    print(layouts.MESHES["hsdp+tp"].axes)       # ('replicate', 'shard', 'tp'), the slowest first
    print(layouts.AXES["tp"].sends)
    mesh = make_mesh("cuda", torch.arange(64).view(2, 4, 8), layouts.MESHES["hsdp+tp"].axes)

(The idea of a table is Edward Yang's: blog.ezyang.com, "The Parallelism Mesh Zoo", 2025.)
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["AXES", "MESHES", "Mesh", "MeshAxis"]


class MeshAxis(NamedTuple):
    """What ranks along one axis of a mesh have in parts, and what they send each other.

    Attributes:
        shards: What each rank has a part of: weights, gradients, optimizer, activations,
            batch, sequence, layers or experts. The rest each rank has whole.
        sends: When, and which collective of what.
        source: Where it was described first.
    """

    shards: str
    sends: tuple[str, ...]
    source: str


class Mesh(NamedTuple):
    """A mesh in use.

    Attributes:
        axes: The names of its axes, the slowest varying first.
        when: When to use it.
    """

    axes: tuple[str, ...]
    when: str


AXES = {
    "pp": MeshAxis(
        "layers, weights, gradients, optimizer",
        ("forward: send of each micro-batch's activations to the next stage",
         "backward: send of their gradients to the previous stage",
         "after backward: all-reduce of tied embeddings' gradients, first and last stage",),
        "GPipe, arXiv:1811.06965; 1F1B (PipeDream-Flush), arXiv:2006.09503"),
    "replicate": MeshAxis(
        "batch",
        ("backward: all-reduce of the gradients' shards, after their reduce-scatter",),
        "MiCS, arXiv:2205.00119; PyTorch FSDP (hybrid sharding), arXiv:2304.11277"),
    "dp": MeshAxis(
        "batch",
        ("backward: all-reduce of the gradients, in buckets as they are ready",),
        "PyTorch Distributed, arXiv:2006.15704"),
    "shard": MeshAxis(
        "weights, gradients, optimizer, batch",
        ("forward: all-gather of each module's weights",
         "backward: all-gather of them again, and reduce-scatter of their gradients",),
        "ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277"),
    "ep": MeshAxis(
        "experts, batch",
        ("forward: all-to-all of tokens to their experts, and of the results back",
         "backward: the same two all-to-alls of gradients",
         "backward: all-reduce of the gradients of all weights but the experts'",),
        "GShard, arXiv:2006.16668"),
    "cp": MeshAxis(
        "sequence, activations",
        ("forward: send of keys and values around a ring, or all-to-all of heads, in attention",
         "backward: the same, of them and of their gradients",
         "backward: all-reduce of the gradients of the weights",),
        "Ring attention, arXiv:2310.01889; DeepSpeed-Ulysses, arXiv:2309.14509"),
    "tp": MeshAxis(
        "weights, gradients, optimizer, activations within blocks",
        ("forward: all-reduce of activations, after attention and after the MLP",
         "backward: all-reduce of the gradients of what goes into the two",),
        "Megatron-LM, arXiv:1909.08053"),
    "tp+sp": MeshAxis(
        "weights, gradients, optimizer, activations",
        ("forward: all-gather before attention and the MLP, reduce-scatter after them",
         "backward: reduce-scatter and all-gather in turn, and all-gather of the input again",
         "after backward: all-reduce of the gradients of norms and of row-parallel biases",),
        "Reducing Activation Recomputation, arXiv:2205.05198"),
}  # fmt: skip
"""The axes, from the slowest varying to the fastest: what communicates most is nearest. The last is
``tp`` with sequence parallelism."""

MESHES = {
    "dp": Mesh(("dp",),
        "The model with its gradients and optimizer fits one device. Also called DDP."),
    "fsdp": Mesh(("shard",),
        "The model does not fit one device, and the batch is large enough that the weights of a "
        "module arrive while another one computes."),
    "hsdp": Mesh(("replicate", "shard"),
        "fsdp on more nodes than one all-gather should span: shard within a node or a few, "
        "replicate over the others."),
    "tp": Mesh(("tp",),
        "One layer, or its activations, is too large for one device, or the batch too small to be "
        "split further. Within a node."),
    "tp+sp": Mesh(("tp",),
        "Wherever tp is, if the sequence divides: about as many bytes are sent, and the "
        "activations between blocks are split too."),
    "cp": Mesh(("cp",), "Sequences are so long that the activations of one do not fit."),
    "pp": Mesh(("pp",),
        "The layers of one model, over links too slow for anything else. Needs several "
        "micro-batches for each stage."),
    "ep": Mesh(("ep",), "A mixture of experts that do not fit together on one device."),
    "dp+ep": Mesh(("dp", "ep"), "A mixture of experts on more ranks than should exchange tokens."),
    "fsdp+tp": Mesh(("shard", "tp"),
        "Hundreds of ranks: tp within a node lets fsdp span fewer ranks, and the global batch be "
        "smaller."),
    "hsdp+tp": Mesh(("replicate", "shard", "tp"),
        "Thousands of ranks, where even with tp fsdp alone would span too many."),
    "dp+tp+pp": Mesh(("pp", "dp", "tp"),
        "Megatron-LM's three dimensions: tp within a node, dp over the nodes near it, pp over the "
        "slowest links."),
    "fsdp+tp+cp+pp": Mesh(("pp", "shard", "cp", "tp"),
        "The largest models at long context: tp nearest, then cp, fsdp, and pp. (Llama 3, "
        "arXiv:2407.21783, puts pp before fsdp.)"),
}  # fmt: skip
