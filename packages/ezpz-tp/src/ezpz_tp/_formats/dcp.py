"""`torch.distributed.checkpoint`: a rank's shards as DTensors, and its folders read and written.

A folder has ``.metadata``, a pickle that says where each piece of each tensor is, and files of
archives of `torch.save`, one a piece. What is split is pieces there; matrices that are stacked in
one weight are a tensor each, ``<name>.block0``, ``<name>.block1``, ...
"""

from __future__ import annotations

import importlib
import io
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ezpz_tp._errors import DegreeError, ParallelError
from ezpz_tp._shard import Piece, Shard, optimizer_name, parameter_of, whole
from ezpz_tp._state import ParallelState
from ezpz_tp._state_dict import names_of, nested, parts_of, state_or_alone, survey, with_optimizer

from . import (
    Format,
    Options,
    Source,
    Stored,
    Way,
    all_splits,
    new_folder,
    open_source,
    strides_of,
    written,
)
from .torch_file import FilePart, Foreign, TorchFile

Items = dict[str, Any]


@torch.no_grad()
def dtensor_state_dict(
    module: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    state: ParallelState | None = None,
    loading: bool = False,
) -> Items:
    """Return what this rank holds, as views that `torch.distributed.checkpoint` saves or fills.

    What is split is a DTensor over the tensor group, ``Shard(dim)``; what is whole is a plain
    tensor. So a checkpoint has the full tensors, of their true sizes, and loads at any degree,
    in any program. Matrices that are stacked in one weight are a tensor each, ``<name>.block0``,
    ``<name>.block1``, ...: DTensor has no public placement for several stretches of one dim.

        checkpoint.save(dtensor_state_dict(model, optimizer=optimizer), checkpoint_id=path)

        held = dtensor_state_dict(model, optimizer=optimizer, loading=True)
        checkpoint.load(held, checkpoint_id=path)
        load_dtensor_state_dict(model, held, optimizer=optimizer)

    Collective: every rank calls this.

    Args:
        module: This rank's model, or stage of it; stages use the names of the whole model.
        optimizer: Add its state, by the names of parameters.
        state: Whose groups; the default's if None.
        loading: Let an optimizer that has made no step yet make its state, to be filled. It makes
            a step with gradients of zero at a learning rate of zero, as
            ``torch.distributed.checkpoint.state_dict`` does.

    Returns:
        Tensors by name; with an optimizer ``{"model": that, "optimizer": {"state": {name:
        {"exp_avg": ..., ...}}, "param_groups": {name: {"lr": ..., ...}}}}``, which are the keys
        that torch has with ``flatten_optimizer_state_dict=True``.

    Raises:
        DegreeError: A tensor has not the shape that its metadata say.
        ParallelError: As of `gather_state_dict`.
    """
    state = state_or_alone(state)
    if optimizer is not None and loading:
        _make_state(optimizer)
    parts, _ = survey(module, optimizer, state)
    group = state.group("tensor")
    items: Items = {}
    for name, part in parts.tensors.items():
        parameter, key = parameter_of(name)
        for piece, tensor in _dtensors(parameter, part.tensor, part.shard, group):
            items[optimizer_name(piece, key)] = tensor
    model, states = nested({**items, **parts.values})
    if optimizer is None:
        return model
    options: dict[str, Items] = {}
    for found in parts.groups or ():
        names = found.pop("params")
        options |= {name: dict(found) for name in names}
    return {"model": model, "optimizer": {"state": states, "param_groups": options}}


@torch.no_grad()
def load_dtensor_state_dict(
    module: nn.Module,
    held: Mapping[str, Any],
    *,
    optimizer: Optimizer | None = None,
    state: ParallelState | None = None,
) -> None:
    """Take what `dtensor_state_dict` returned, after ``torch.distributed.checkpoint.load``.

    Its tensors are views of the module's and the optimizer's, and hold the values already; what
    is set here is the rest, such as the learning rate. Tensors of another dict are copied. The
    padding of a vocabulary is left as it is. Nothing is sent.

    Args:
        module: This rank's model, or stage of it.
        held: Tensors by name, or ``{"model": ..., "optimizer": ...}`` with an optimizer.
        optimizer: It has state already, as after ``dtensor_state_dict(..., loading=True)``.
        state: Whose groups; the default's if None.

    Raises:
        DegreeError: A tensor has not the shape that this rank needs.
        ParallelError: A tensor is missing, or is one that the module has not; or parameters of one
            group have different options.
    """
    state = state_or_alone(state)
    model, saved = with_optimizer(held, optimizer, "load_dtensor_state_dict", "dtensor_state_dict")
    given, group = {**model}, state.group("tensor")
    for name, values in saved["state"].items():
        given |= {optimizer_name(name, key): value for key, value in values.items()}
    parts = parts_of(module, optimizer, state)
    for name, part in parts.tensors.items():
        parameter, key = parameter_of(name)
        for piece, tensor, _ in _views(parameter, part.tensor, part.shard, group):
            own = optimizer_name(piece, key)
            _copy(_said(own), given.pop(own, None), tensor)
    rest = {name: given.pop(name, None) for name in parts.values}
    if given:
        raise ParallelError(
            f"load_dtensor_state_dict: {_said(next(iter(given)))} is none of "
            f"{type(module).__name__}'s, and {len(given) - 1} others; expected the names of "
            "dtensor_state_dict"
        )
    extra, states = nested(rest)
    if extra:
        module.load_state_dict(extra, strict=False)
    if optimizer is None:
        return
    names = names_of(optimizer, module)
    for owner, name in names.items():
        for key, value in states.get(name, {}).items():
            optimizer.state[owner][key] = value
    for options in optimizer.param_groups:
        _set_options(options, [names[one] for one in options["params"]], saved["param_groups"])


def _dtensors(
    name: str, local: Tensor, shard: Shard, group: ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and DTensor of each matrix of a tensor, views of it without padding."""
    from torch.distributed import tensor as dtensor  # noqa: PLC0415 - heavy to import
    from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415

    for piece, view, matrix in _views(name, local, shard, group):
        if shard.dim is None or group.size() == 1:
            yield piece, view
            continue
        mesh, placed = DeviceMesh.from_group(group, view.device.type), [dtensor.Shard(shard.dim)]
        shape, stride = torch.Size(matrix.full_shape), strides_of(matrix.full_shape)
        about: Any = {"shape": shape, "stride": stride, "run_check": False}
        yield piece, dtensor.DTensor.from_local(view, mesh, placed, **about)


def _views(
    name: str, local: Tensor, shard: Shard, group: ProcessGroup
) -> Iterator[tuple[str, Tensor, Shard]]:
    start = 0
    for piece, matrix in _matrices(name, shard):
        view = local
        if shard.dim is not None:
            length = sum(length for *_, length in matrix.pieces(group.rank(), group.size()))
            view = local.narrow(shard.dim, start, length)
            start += length
        yield piece, view, matrix


def _matrices(name: str, shard: Shard) -> list[tuple[str, Shard]]:
    if shard.dim is None or not shard.blocks:
        return [(name, shard)]
    before, after = shard.full_shape[: shard.dim], shard.full_shape[shard.dim + 1 :]
    return [
        (f"{name}.block{number}", Shard((*before, size, *after), shard.dim))
        for number, size in enumerate(shard.blocks)
    ]


def _said(name: str) -> str:
    parameter, key = parameter_of(name)
    return parameter if key is None else f"{parameter}, {key!r} of the optimizer,"


def _copy(what: str, found: Any, into: Tensor) -> None:
    local = found.to_local() if hasattr(found, "to_local") else found
    if not isinstance(local, Tensor):
        raise ParallelError(
            f"load_dtensor_state_dict: {what} is missing; expected a tensor of shape "
            f"{tuple(into.shape)}"
        )
    if local.shape != into.shape:
        raise DegreeError(
            f"load_dtensor_state_dict: {what} has shape {tuple(local.shape)} on this rank; "
            f"expected {tuple(into.shape)}"
        )
    if local.data_ptr() != into.data_ptr() or local.stride() != into.stride():
        into.copy_(local)


def _set_options(group: Items, names: list[str], options: Mapping[str, Items]) -> None:
    """Set a group's hyperparameters; a tensor stays a tensor and a tuple a tuple."""
    for name in names:
        if name not in options:
            raise ParallelError(
                f"load_dtensor_state_dict: param_groups has nothing of {name}; expected the "
                "options of each parameter, by name"
            )
        if options[name] != options[names[0]]:
            raise ParallelError(
                f"load_dtensor_state_dict: {names[0]} and {name} are in one group of the "
                f"optimizer, but have the options {dict(options[names[0]])} and "
                f"{dict(options[name])}; expected the groups that were saved"
            )
    for key, value in options[names[0]].items() if names else ():
        before = group.get(key)
        if isinstance(before, Tensor) and not isinstance(value, Tensor):
            group[key] = torch.tensor(value, dtype=before.dtype, device=before.device)
        else:
            group[key] = tuple(value) if isinstance(before, tuple) else value


def _make_state(optimizer: Optimizer) -> None:
    from torch.distributed.checkpoint.state_dict import _init_optim_state  # noqa: PLC0415 - heavy

    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    before = [each.grad for each in parameters]
    try:
        for each in parameters:
            each.grad = None  # torch makes no state where there is one
        _init_optim_state(optimizer)
    finally:
        for each, grad in zip(parameters, before, strict=True):
            each.grad = grad


# Folders.

_METADATA = ".metadata"
_BLOCK = re.compile(r"(.+)\.block(\d+)")
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if type(value) is torch.dtype)},
}  # fmt: skip
"""What a metadata file may ask for; of anything else nothing is run."""


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enum, as Python 3.11.2 pickles one: by getattr."""
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name in _KNOWN.get(module, ()):
            return getattr(importlib.import_module(module), name)
        return type(name, (Foreign,), {})


def _open(path: Path, options: Options) -> Source:
    try:
        metadata = _Unpickler(io.BytesIO((path / _METADATA).read_bytes())).load()
        return _pieces_in(path, metadata, options)
    except ParallelError:
        raise
    except Exception as error:  # a pickle that is damaged raises anything
        raise ParallelError(f"{path / _METADATA}: is damaged: {error!r}") from error


FORMAT = Format("torch.distributed.checkpoint", lambda path: (path / _METADATA).is_file(), _open)

Keys: TypeAlias = tuple[Any, ...]  # of nested dicts, under which a state dict has a value
Pieces: TypeAlias = list[tuple[Piece, Stored]]


def _pieces_in(folder: Path, metadata: Any, options: Options) -> Source:
    planner = metadata.planner_data or {}
    # ezpz_dist's checkpoints, of which the model is read, say no keys.
    of_dist = not planner and "common" in metadata.state_dict_metadata
    where = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], Pieces]] = {}
    others: dict[Keys, bytes] = {}
    for key, about in metadata.state_dict_metadata.items():
        keys: Keys = planner.get(key, (key,))
        if of_dist:
            if not key.startswith("model."):
                continue
            keys = ("model", key.removeprefix("model."))
        if not hasattr(about, "chunks"):
            with FilePart(*_place(folder, where[key, None])) as file:
                others[keys] = file.readall()
            continue
        dtype, pieces = about.properties.dtype, Pieces()
        for chunk in about.chunks:
            piece = Piece(tuple(chunk.offsets), tuple(chunk.sizes))
            place = _place(folder, where[key, chunk.offsets])
            pieces.append((piece, _stored(place, piece.sizes, dtype)))
        tensors[_name(keys)] = dtype, tuple(about.size), pieces
    in_model = any(keys[0] == "model" and len(keys) == 2 for keys in planner.values())
    source = Source({"others": others, **({"nested": True} if in_model else {})})
    table = all_splits()
    for name, names in _stacked(tensors).items():
        shard, pieces = _joined([tensors[each][1:] for each in names])
        if shard.dim is None:
            shard = options.shard(table, name, shard.full_shape) or shard
        source.add(name, tensors[names[0]][0], shard, pieces)
    return source


def _place(folder: Path, info: Any) -> tuple[Path, int, int]:
    """Return the file that a piece, or another object, is in, where, and of what length."""
    path = folder / info.relative_path
    if "/" in info.relative_path or getattr(info, "transform_descriptors", None):
        raise ParallelError(f"{path}: expected a file of the folder, not compressed")
    return path, int(info.offset), int(info.length)


def _stored(place: tuple[Path, int, int], shape: tuple[int, ...], dtype: torch.dtype) -> Stored:
    file = TorchFile(*place)
    tensor = file.contents
    found = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, Tensor) else tensor
    if found != (shape, dtype):
        raise ParallelError(
            f"{file.path}: at byte {place[1]} is {found}; expected a tensor of shape and dtype "
            f"{(shape, dtype)}, as {_METADATA} says"
        )
    return file.stored(tensor)


def _name(keys: Keys) -> str:
    if keys[:2] == ("optimizer", "state") and len(keys) == 4:
        return optimizer_name(keys[2], keys[3])
    return str(keys[1]) if keys[0] == "model" and len(keys) == 2 else _key(keys)


def _stacked(tensors: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in tensors:
        parameter, key = parameter_of(name)
        match = _BLOCK.fullmatch(parameter)
        stacked = optimizer_name(match[1] if match else parameter, key)
        found.setdefault(stacked, []).append(name)
    return {stacked if len(names) > 1 else names[0]: names for stacked, names in found.items()}


def _joined(several: Sequence[tuple[tuple[int, ...], Pieces]]) -> tuple[Shard, Pieces]:
    """Return a tensor that is stacked of some, split along the dim that their pieces say."""
    shapes = [shape for shape, _ in several]
    dims = range(len(shapes[0]))
    offsets = [piece.offsets for _, pieces in several for piece, _ in pieces]
    unlike = [d for d in dims if len({shape[d] for shape in shapes}) > 1]
    split = [d for d in dims if any(at[d] for at in offsets)]
    dim = next(iter([*unlike, *split, *([0] if len(several) > 1 else [])]), None)
    if dim is None:
        return Shard(shapes[0]), several[0][1]
    blocks = tuple(shape[dim] for shape in shapes)
    full = (*shapes[0][:dim], sum(blocks), *shapes[0][dim + 1 :])
    moved, origin = Pieces(), [0] * len(full)
    for length, (_, pieces) in zip(blocks, several, strict=True):
        moved += [(piece.moved(origin), stored) for piece, stored in pieces]
        origin[dim] += length
    return Shard(full, dim, blocks, padded=len(blocks) == 1), moved


def reshard(
    path_in: str | Path,
    path_out: str | Path,
    *,
    tp: int,
    pp: int = 1,
    plan: Mapping[str, Way] | None = None,
    vocab_size: int | None = None,
) -> None:
    """Write files of any format that is known for ``torch.distributed.checkpoint``, bit for bit.

    One file for each tensor-parallel rank. What `dtensor_state_dict` returns is loaded from there
    by ``torch.distributed.checkpoint.load``, at any degree and in any pipeline: ``tp`` says what is
    fast. One process, no process groups; of the model one tensor is in memory at a time.

    Everything is checked before anything is written, and ``path_out`` is there once it is whole:
    after an error nothing is.

    Args:
        path_in: Files of Megatron-LM (``mp_rank_NN``), of Meta's Llama (``consolidated.NN.pth``),
            safetensors in Hugging Face's layout, or a folder of ``torch.distributed.checkpoint``.
        path_out: A folder that is not there yet, or is empty.
        tp: The tensor-parallel degree to write for.
        pp: Without effect: any number of pipeline stages loads the folder.
        plan: How tensors are split, for files that do not say it: patterns of names, and the dim,
            None for what is whole, or ``(dim, matrices)`` with their number or sizes.
        vocab_size: The vocabulary without padding, for files that do not say it.

    Raises:
        DegreeError: A degree does not divide a tensor; names it.
        ParallelError: A file is missing, truncated or does not fit the others; ``path_out`` is
            there already.
    """
    for what, degree in (("tp", tp), ("pp", pp)):
        if degree < 1:
            raise DegreeError(f"{what}={degree}; expected at least 1")
    source = open_source(path_in, Options(plan, vocab_size))
    for entry in source.entries.values():
        entry.local_shape(0, tp)
    with new_folder(path_out) as folder:
        _write(source, folder, tp)


def _write(source: Source, folder: Path, tp: int) -> None:
    from torch.distributed.checkpoint import metadata  # noqa: PLC0415 - heavy to import
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415

    optimizer = any(parameter_of(name)[1] for name in source.entries)
    in_model = optimizer or "nested" in source.metadata
    about = metadata.Metadata({}, planner_data={}, storage_data={})
    names = [f"__{rank}_0.distcp" for rank in range(tp)]
    with ExitStack() as stack:
        files = [stack.enter_context(written(folder / name)) for name in names]

        def write(keys: Keys, rank: int, data: Tensor | bytes, offsets: Any = None) -> None:
            file, start = files[rank], files[rank].tell()
            if isinstance(data, bytes):
                file.write(data)
            else:
                torch.save(data, file)
            key, info = _key(keys), _StorageInfo(names[rank], start, file.tell() - start)
            about.storage_data[metadata.MetadataIndex(key, offsets)] = info
            about.planner_data[key] = keys

        for entry in source.entries.values():
            full = torch.empty(entry.shard.full_shape, dtype=entry.dtype)
            source.read(entry.name, whole(entry.shard.full_shape), full)
            parameter, option = parameter_of(entry.name)
            matrices = _matrices(parameter, entry.shard)
            parts = full.split(entry.shard.blocks, entry.shard.dim) if len(matrices) > 1 else [full]
            for (name, matrix), values in zip(matrices, parts, strict=True):
                keys, chunks = _keys(name, option, in_model=in_model), []
                for rank, piece in _dealt(matrix, tp, [file.tell() for file in files]):
                    held = values[piece.slices]
                    if held.numel() != full.numel():  # torch saves all that it is a view of
                        held = held.clone(memory_format=torch.contiguous_format)
                    offsets = torch.Size(piece.offsets)
                    write(keys, rank, held, offsets)
                    chunks.append(metadata.ChunkStorageMetadata(offsets, torch.Size(piece.sizes)))
                    del held
                kind, size = metadata.TensorProperties(entry.dtype), torch.Size(matrix.full_shape)
                said = metadata.TensorStorageMetadata(kind, size, chunks)
                about.state_dict_metadata[_key(keys)] = said
            del values, parts, full  # before the next is made
        for keys, data in source.metadata.get("others", {}).items():
            write(keys, 0, data)
            about.state_dict_metadata[_key(keys)] = metadata.BytesStorageMetadata()
        pickle.dump(about, stack.enter_context(written(folder / _METADATA)))


def _key(keys: Keys) -> str:
    return ".".join(map(str, keys))


def _keys(parameter: str, key: str | None, *, in_model: bool) -> Keys:
    if key is not None:
        return "optimizer", "state", parameter, key
    return ("model", parameter) if in_model else (parameter,)


def _dealt(shard: Shard, tp: int, lengths: Sequence[int]) -> list[tuple[int, Piece]]:
    """Return which rank's file has which piece; what is not split has the shortest one."""
    ranks = range(tp if shard.dim is not None else 0)
    pieces = [(rank, full) for rank in ranks for _, full in shard.boxes(rank, tp)]
    return pieces or [(lengths.index(min(lengths)), whole(shard.full_shape))]
