"""Folders of files: how they are made, what is in them, and what is said of damaged ones."""

import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ezpz_tp import (
    ParallelError,
    Piece,
    dtensor_state_dict,
    gather_state_dict,
    load_dtensor_state_dict,
)
from ezpz_tp._formats.safetensors import write_safetensors
from ezpz_tp._shard import whole


def some(dtype, *shape):
    """Values of any bits: NaNs with payloads, negative zeros and denormals; of bool 0 and 1."""
    size = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(size)
    high = 2 if dtype is torch.bool else 256
    bytes_ = torch.randint(high, (size,), generator=generator, dtype=torch.uint8)
    return bytes_.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def bits(tensor):
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def assert_same(found, expected, where=""):
    """Compare nested values in any order of names, tensors to the last bit."""
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(bits(found), bits(expected)), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}/{key}")
    else:
        assert type(found) is type(expected), where
        assert found == expected, where


def assert_refused(folder, message, *writes):
    """Whether ``folder/in`` is refused, and nothing is written beside it."""
    for write in writes:
        with pytest.raises(ParallelError, match=message):
            write(folder / "in", folder / "out")
        assert os.listdir(folder) == ["in"]


def transformer(layers, width, heads, groups, inner, vocabulary, dtype=torch.bfloat16, biases=()):
    """A whole model by Hugging Face's names; a head has 8 channels."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"model.embed_tokens.weight": (vocabulary, width)}
    for layer in range(layers):
        of_layer = {
            "self_attn.q_proj": (8 * heads, width),
            "self_attn.k_proj": (8 * groups, width),
            "self_attn.v_proj": (8 * groups, width),
            "self_attn.o_proj": (width, 8 * heads),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        for name, shape in of_layer.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
            if name.partition(".")[2] in biases:
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def read(stored, offsets=None, sizes=None):
    box = whole(stored.shape) if offsets is None else Piece(offsets, sizes)
    out = torch.zeros(box.sizes, dtype=stored.dtype)
    stored.read(box, out)
    return out


def full(source):
    found = {}
    for name, entry in source.entries.items():
        found[name] = torch.empty(entry.shard.full_shape, dtype=entry.dtype)
        source.read(name, whole(entry.shard.full_shape), found[name])
    return found


def save_dcp(path, model, optimizer=None, **extra):
    held = dtensor_state_dict(model, optimizer=optimizer)
    dcp.save({**held, **extra}, checkpoint_id=path)
    return gather_state_dict(model, optimizer=optimizer)


def load_dcp(path, model, optimizer=None, **extra):
    held = dtensor_state_dict(model, optimizer=optimizer, loading=True)
    dcp.load({**held, **extra}, checkpoint_id=path)
    load_dtensor_state_dict(model, held, optimizer=optimizer)
    return gather_state_dict(model, optimizer=optimizer)


def torch_finds(folder):
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


def write_tensors(path, tensors, metadata=None):
    said = {name: (value.dtype, tuple(value.shape), [value]) for name, value in tensors.items()}
    write_safetensors(path, said, metadata)
    return path
