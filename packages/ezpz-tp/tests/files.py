"""Folders of files: what torch finds in its own, and those of the release before."""

import json

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ezpz_tp._formats.safetensors import TensorWriter, name_of
from ezpz_tp._shard import parameter_of

INDEX = "shards.json"


def torch_finds(folder):
    """Full tensors, and the rest, by torch's own reading."""
    file = folder.with_suffix(".pt")
    dcp_to_torch_save(folder, file)
    found = torch.load(file)
    file.unlink()
    return found


def pieces_in(folder):
    """Offsets and sizes of the pieces of each tensor, by the rank in the file's name."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    return {
        (key, int(metadata.storage_data[index].relative_path[2:].partition("_")[0])): (
            tuple(chunk.offsets),
            tuple(chunk.sizes),
        )
        for key, about in metadata.state_dict_metadata.items()
        for chunk in getattr(about, "chunks", ())
        for index in metadata.storage_data
        if (index.fqn, index.offset) == (key, chunk.offsets)
    }


def write_old_shards(folder, full, held, tp, pp=1, groups=None, values=(), extra=()):
    """Write what ``save_shards`` wrote: ``held`` has each tensor's `Held`, ``full`` its values."""
    folder.mkdir()
    said = {"format": "ezpz_tp shards", "version": 1, "save": "a word", "tp": tp, "pp": pp}
    rest = {"values": dict(values), "extra": dict(extra)}
    if groups is not None:
        rest["param_groups"] = groups
    tensors = {name: _said(one) for name, one in held.items()}
    for stage in range(pp):
        own = {name: one.entry for name, one in held.items() if stage in one.stages}
        for rank in range(tp):
            place = {"tp": rank, "tp_size": tp, "pp": stage, "pp_size": pp}
            stamp = {**said, **place}
            local = {
                name: (entry.dtype, entry.shard.local_shape(rank, tp))
                for name, entry in own.items()
            }
            path = folder / f"pp{stage:02}-tp{rank:02}.safetensors"
            with TensorWriter(path, local, {"format": "pt", "ezpz_tp": json.dumps(stamp)}) as file:
                for name, entry in own.items() if full else ():
                    dim = entry.shard.dim or 0
                    for at, start, length in entry.shard.pieces(rank, tp):
                        whole = value_of(full, name)
                        part = whole.narrow(dim, start, length) if whole.dim() else whole
                        file.write(name, part, dim, at)
    (folder / INDEX).write_text(json.dumps({**said, **rest, "tensors": tensors}))


def value_of(full, name):
    """A tensor of what `gather_state_dict` returns, by its name in files."""
    parameter, key = parameter_of(name)
    if key is not None:
        return full["optimizer"]["state"][parameter][key]
    return full["model"][parameter] if "model" in full else full[parameter]


def _said(held):
    shard = held.entry.shard
    return {
        "dtype": name_of(held.entry.dtype, held.entry.name),
        "shape": list(shard.full_shape),
        "dim": shard.dim,
        **({"blocks": list(shard.blocks)} if shard.blocks else {}),
        **({"padded": True} if shard.padded else {}),
        "stages": list(held.stages),
    }
