"""Files of tokens: written whole or not at all, read in blocks, refused when they are not right."""

import os
import pickle

import numpy as np
import pytest
import torch

from ezpz.data import TokenBlocks, python_sources, text_files, write_tokens
from ezpz_dist import DataError


@pytest.fixture
def files(tmp_path):
    found = []
    for text in ("first", "second", "third"):
        found.append(tmp_path / f"{text}.txt")
        found[-1].write_text(text)
    return found


@pytest.fixture
def path(tmp_path, files):
    return write_tokens(tmp_path / "text.npy", files)


def test_bytes_and_documents(path):
    blocks = TokenBlocks(path, 5)
    assert len(blocks) == 3
    assert bytes(np.load(path, mmap_mode="r")) == b"first\0second\0third\0"
    tokens, targets = blocks[0]
    assert tokens.dtype == targets.dtype == torch.int64
    assert bytes(tokens.tolist()) == b"first"
    assert bytes(targets.tolist()) == b"irst\0"
    assert bytes(blocks[-1][1].tolist()) == b"d\0thi"
    with pytest.raises(IndexError, match="block 3 of 3"):
        blocks[3]
    raw = pickle.dumps(blocks)
    assert len(raw) < 1000, "a copy for a worker maps the file itself"
    assert torch.equal(pickle.loads(raw)[1][0], blocks[1][0])
    assert len(TokenBlocks(path, 18)) == 1
    for block in (0, 19):
        with pytest.raises(DataError, match="expected 1 to 18"):
            TokenBlocks(path, block)


@pytest.mark.parametrize(("last", "itemsize"), [(255, 1), (256, 2), (65_536, 4)])
def test_a_tokenizer(tmp_path, files, last, itemsize):
    def encode(text):
        return [len(text), last - 1]

    path = write_tokens(tmp_path / "a.npy", files, encode=encode, separator=last)
    assert np.load(path).itemsize == itemsize
    assert TokenBlocks(path, 5)[0][0].tolist() == [5, last - 1, last, 6, last - 1]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "expected a file of write_tokens"),
        (lambda path: path.write_text("text " * 50), "expected a file of write_tokens"),
        (lambda path: path.write_bytes(b""), "expected a file of write_tokens"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: np.save(path, np.zeros(9)), "float64 of shape .*; expected whole numbers"),
        (lambda path: np.save(path, np.zeros((9, 9), int)), "expected whole numbers in one dim"),
    ],
    ids=["truncated", "text", "empty", "missing", "floats", "two-dims"],
)
def test_what_is_not_right_is_refused(path, damage, words):
    damage(path)
    with pytest.raises(DataError, match=words):
        TokenBlocks(path, 5)


def test_a_writer_that_fails_leaves_what_was_there(path, files, tmp_path):
    before = path.read_bytes()
    names = sorted(tmp_path.iterdir())
    latin = tmp_path / "latin"
    latin.write_bytes(b"caf\xe9")
    for given, options, words in (
        ([latin], {"encode": list}, "can't decode"),
        ([tmp_path / "none"], {}, "No such file"),
        ([], {}, "need at least one array"),
    ):
        with pytest.raises(DataError, match=words):
            write_tokens(path, given, **options)
    latin.unlink()
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == names
    with pytest.raises(DataError, match="Not a directory"):
        write_tokens(path / "below", files)


def test_which_files(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text("text")
    assert [file.name for file in text_files(tmp_path)] == ["a.txt", "b.txt"]
    assert [file.name for file in text_files(tmp_path, "")] == ["a.txt", "b.txt", "c.md"]
    assert text_files(tmp_path / "c.md") == [tmp_path / "c.md"]
    assert [file.name for file in text_files(tmp_path, most=5)] == ["a.txt"]
    with pytest.raises(DataError, match=r"no text files in .* within 3 bytes"):
        text_files(tmp_path, most=3)
    with pytest.raises(DataError, match="no text files"):
        text_files(tmp_path / "nowhere")
    assert {"this.py", "decoder.py"} <= {file.name for file in python_sources()}
    some = python_sources(most=2_000_000)
    assert sum(file.stat().st_size for file in some) <= 2_000_000
    assert not any("site-packages" in str(file) for file in some)


def test_text_that_cannot_be_read_is_not_passed_over(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("text")
    real = os.scandir

    def scandir(folder):
        if os.fspath(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", os.fspath(folder))
        return real(folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)  # root may read everything
        with pytest.raises(DataError, match=r"closed: Permission denied; expected a folder"):
            text_files(tmp_path)
    (tmp_path / "b.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"b.txt: No such file or directory; expected a file"):
        text_files(tmp_path)


def test_a_data_set_of_hugging_face_goes_into_the_loader():
    datasets = pytest.importorskip("datasets")
    from ezpz_dist import DataLoader

    made = datasets.Dataset.from_dict({"x": [1.0, 2.0, 3.0]}).with_format("torch")
    assert [batch["x"].tolist() for batch in DataLoader(made, 2)] == [[1.0, 2.0], [3.0]]
