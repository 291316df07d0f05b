"""Folders of torch.distributed.checkpoint, written and read; and values compared bit for bit."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ezpz_tp import dtensor_state_dict, gather_state_dict, load_dtensor_state_dict


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
