"""Real images that need no download: scikit-learn's scanned digits."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from ezpz_dist import DataError

_FILE = "data/digits.csv.gz"
_TEST = 359  # images that are kept for the test: a fifth


def digits(part: str = "train") -> TensorDataset:
    """Return handwritten digits: 1,438 images to train with, or 359 others to test.

    The same on every rank. They come with scikit-learn, and are the test set of Alpaydin and
    Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.

    >>> image, label = digits("test")[0]
    >>> image.shape, label.dtype
    (torch.Size([1, 8, 8]), torch.int64)

    Args:
        part: ``"train"`` or ``"test"``.

    Returns:
        Images ``[1, 8, 8]``, fp32 in 0..1, and labels 0..9, int64.

    Raises:
        DataError: scikit-learn is not installed.
        ValueError: ``part`` is neither.
    """
    if part not in ("train", "test"):
        raise ValueError(f"digits({part!r}); expected 'train' or 'test'")
    # To import scikit-learn takes 2 s of every rank, as long as torch; the file it reads is small.
    found = importlib.util.find_spec("sklearn")
    if not (found and found.origin):
        raise DataError("the digits come with scikit-learn; pip install 'ezpz-suite[examples]'")
    table = np.loadtxt(Path(found.origin).with_name("datasets") / _FILE, delimiter=",")
    # One split for all, whatever a rank's own seed is.
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    chosen = order[:_TEST] if part == "test" else order[_TEST:]
    return TensorDataset(
        torch.tensor(table[:, :-1], dtype=torch.float32).view(-1, 1, 8, 8)[chosen] / 16,
        torch.tensor(table[:, -1], dtype=torch.int64)[chosen],
    )
