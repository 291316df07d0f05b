"""The digits: images and labels, the same split for everybody."""

import builtins

import pytest
import torch

from ezpz.data import digits
from ezpz_dist import DataError


def test_digits():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    train, test = digits(), digits("test")
    assert (len(train), len(test)) == (1438, 359)
    images, labels = train.tensors
    assert images.shape == (1438, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert labels.dtype == torch.int64
    assert labels.bincount().min() > 100
    torch.manual_seed(5)
    assert torch.equal(digits("test").tensors[0], test.tensors[0])
    both = torch.cat([images, test.tensors[0]]).flatten(1)
    assert len(both.unique(dim=0)) == 1797
    with pytest.raises(ValueError, match="expected 'train' or 'test'"):
        digits("dev")


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'ezpz-suite\[examples\]'") as error:
        digits()
    assert "\n" not in str(error.value)
