"""The digits: images and labels, the same split for everybody."""

import importlib.util

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
    with pytest.raises(ValueError, match="expected 'train' or 'test'"):
        digits("dev")


def test_they_are_those_of_scikit_learn():
    load = pytest.importorskip("sklearn.datasets").load_digits
    images, labels = load(return_X_y=True)
    expected = [[*image, label] for image, label in zip(images.tolist(), labels, strict=True)]
    found = [
        [*(image * 16).flatten().tolist(), label.item()]
        for part in ("train", "test")
        for image, label in digits(part)
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.slow
def test_scikit_learn_is_not_imported(ranks):
    """Its import takes as long as torch's, on every rank."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    script = "import sys; from ezpz.data import digits; digits(); print('sklearn' in sys.modules)"
    assert ranks(1, script) == ["False\n"]


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'ezpz-suite\[examples\]'"):
        digits()
