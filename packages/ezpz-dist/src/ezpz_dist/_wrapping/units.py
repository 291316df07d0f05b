"""Which modules of a model are sharded by themselves: gathered when they run, freed after."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator

from torch import nn

_Named = Iterator[tuple[str, nn.Module]]


def find_units(
    model: nn.Module, kinds: Collection[type[nn.Module]] | None = None
) -> dict[str, nn.Module]:
    """Return the modules to shard by themselves, by name, each before those that contain it.

    Without ``kinds`` these are the members of lists of modules (a transformer's blocks, through
    lists of lists) and, outside of them, embeddings and linear layers (the head).

    What shares a parameter with something outside of it (tied weights), or stands in the model
    twice, is left to the root: FSDP wants the users of a parameter in one unit.

    Args:
        model: The bare model.
        kinds: Classes whose instances are the units, and no others.
    """
    if kinds is None:
        found = dict(_of_list(model, "") if _is_list(model) else _outside(model, ""))
    else:
        wanted = tuple(kinds)
        modules: _Named = model.named_modules()
        found = {name: module for name, module in modules if name and isinstance(module, wanted)}
    homes: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        homes.setdefault(parameter, set()).add(home_of(name, found))
    used = {home for used_in in homes.values() for home in used_in}
    shared = {home for used_in in homes.values() if len(used_in) > 1 for home in used_in}
    return {name: found[name] for name in reversed(found) if name in used - shared}


def home_of(name: str, found: dict[str, nn.Module]) -> str:
    """Return the innermost of the modules found that a parameter is in, or "", the root."""
    while name:
        name = name.rpartition(".")[0]
        if name in found:
            return name
    return ""


def _outside(module: nn.Module, prefix: str) -> _Named:
    """Look for units in what is no list: it reads its children's weights as it likes."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if _is_list(child):
            yield from _of_list(child, f"{path}.")
        elif _is_matrix(child):
            yield path, child
        elif not isinstance(child, nn.MultiheadAttention):  # reads the weights of its child
            yield from _outside(child, f"{path}.")


def _of_list(container: nn.Module, prefix: str) -> _Named:
    for name, block in container.named_children():
        path = f"{prefix}{name}"
        if isinstance(block, (nn.ModuleList, nn.ModuleDict)) or (
            isinstance(block, nn.Sequential) and all(_is_composed(one) for one in block)
        ):
            yield from _of_list(block, f"{path}.")
        elif any(parameter.dim() > 1 for parameter in block.parameters()):
            # A norm by itself would cost a collective for a few numbers.
            yield path, block


def _is_list(module: nn.Module) -> bool:
    """Return whether the members of a module are blocks. A Sequential may also be a block."""
    if isinstance(module, nn.Sequential):
        return any(_is_composed(member) for member in module)
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _is_composed(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _is_matrix(module: nn.Module) -> bool:
    """Return whether a module is used by its forward alone. Subclasses may be read by others."""
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding)
    if tp := sys.modules.get("ezpz_tp"):
        kinds += (tp.ColumnParallelLinear, tp.RowParallelLinear)
        kinds += (tp.ParallelEmbedding, tp.VocabParallelEmbedding)
    return type(module) in kinds
