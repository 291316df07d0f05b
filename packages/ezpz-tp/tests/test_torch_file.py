"""Files of torch.save, read and written a stretch at a time."""

import argparse
import enum
import io
import os
import random
import struct
import zipfile

import pytest
import torch
from files import assert_same, bits, some

import ezpz_tp._formats
from ezpz_tp import ParallelError, Piece
from ezpz_tp._formats import Stored, torch_file
from ezpz_tp._formats.torch_file import Foreign, TorchFile, write_torch_file

WORDS = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 "
    "uint16 bool complex64 complex128"
)
DTYPES = [getattr(torch, name) for name in WORDS.split()]


class Color(enum.Enum):
    RED = 1


class Runs:
    """What a file must not be able to have run."""

    def __reduce__(self):
        return os.mkdir, ("run-by-a-file",)


def tagged(tensor):
    tensor.partition_dim = 0
    return tensor


def read(file, name, dim=0, start=0, length=None):
    stored = file.contents[name]
    file.check(name, stored)
    shape = list(stored.shape)
    if shape:
        shape[dim] = shape[dim] - start if length is None else length
    out = torch.zeros(shape, dtype=stored.dtype)
    stored.read(Piece(tuple(start * (d == dim) for d in range(len(shape))), tuple(shape)), out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_torch_save_writes_is_read_bit_for_bit(tmp_path, dtype):
    saved = {"matrix": some(dtype, 7, 5), "cube": some(dtype, 3, 4, 5), "number": some(dtype)}
    torch.save(saved, tmp_path / "a.pt")
    file = TorchFile(tmp_path / "a.pt")
    for name, value in saved.items():
        assert file.contents[name].dtype == dtype
        assert torch.equal(bits(read(file, name)), bits(value))
    for dim, start, length in [(0, 1, 2), (1, 2, 2), (2, 1, 3), (2, 4, 1)]:
        expected = saved["cube"].narrow(dim, start, length)
        assert torch.equal(bits(read(file, "cube", dim, start, length)), bits(expected))


def test_views_transposed_and_shared_storages(tmp_path, monkeypatch):
    monkeypatch.setattr(ezpz_tp._formats, "CHUNK", 64)
    whole = torch.randn(20, 6)
    saved = {
        "rows": whole[3:9],
        "transposed": whole.t(),
        "columns": whole[:, 2:4],
        "expanded": torch.ones(3, 1).expand(3, 5),
        "parameter": torch.nn.Parameter(torch.randn(4, 4)),
        "tagged": tagged(torch.nn.Parameter(torch.randn(4, 3))),
        "tagged view": tagged(whole[1:3]),
        "empty": torch.zeros(0, 4),
        "not of a row": torch.zeros(4, 0),
        "cube": torch.randn(6, 5, 4),
    }
    torch.save(saved, tmp_path / "a.pt")
    file = TorchFile(tmp_path / "a.pt")
    for name, value in saved.items():
        assert torch.equal(read(file, name), value.detach())
    assert torch.equal(read(file, "transposed", 0, 2, 3), whole.t()[2:5])
    assert torch.equal(read(file, "transposed", 1, 7, 3), whole.t()[:, 7:10])
    assert torch.equal(read(file, "columns", 0, 4, 9), whole[4:13, 2:4])
    assert torch.equal(read(file, "columns", 1, 1, 1), whole[:, 3:4])
    boxes = [Piece((1, 2, 0), (4, 2, 4)), Piece((1, 2, 1), (4, 2, 2)), Piece((0, 1, 1), (6, 3, 2))]
    for box in boxes:  # of several dims at once
        out = torch.zeros(box.sizes)
        file.contents["cube"].read(box, out)
        assert torch.equal(out, saved["cube"][box.slices])
    out = torch.zeros(6, 8).t()[2:8, ::2]  # of any strides
    file.contents["rows"].read(Piece((0, 1), (6, 3)), out[:, :3])
    assert torch.equal(out[:, :3], whole[3:9, 1:4])


def test_a_file_holds_more_than_tensors_and_nothing_of_it_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = {
        "model": {"weight": torch.ones(2)},
        "args": argparse.Namespace(swiglu=True, dtype=torch.bfloat16, color=Color.RED),
        "random": random.getstate(),
        "buffer": io.BytesIO(b"of Transformer Engine"),
        "runs": Runs(),
        "shape": torch.ones(2, 3).shape,
        "set": {1, 2},
        "device": torch.device("cpu"),
    }
    torch.save(saved, "a.pt")
    contents = TorchFile(tmp_path / "a.pt").contents
    assert os.listdir(".") == ["a.pt"]
    assert contents["args"].swiglu is True
    assert contents["args"].dtype is torch.bfloat16
    assert isinstance(contents["args"].color, Foreign)
    assert isinstance(contents["runs"], Foreign)
    assert "mkdir" in repr(contents["runs"])
    assert isinstance(contents["buffer"], Foreign)
    assert contents["random"] == saved["random"]
    assert (contents["shape"], contents["set"]) == ((2, 3), {1, 2})
    assert isinstance(contents["model"]["weight"], Stored)


def test_a_file_cannot_change_what_reads_it(tmp_path):
    """BUILD sets attributes of what was found by name, also of a function."""
    function, name = b"ctorch._utils\n_rebuild_tensor_v2\n", b"X\x0c\x00\x00\x00__defaults__"
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + function + b"(N}" + name + b"(I1\ntstb.")
    assert TorchFile(tmp_path / "a.pt").contents.__defaults__ == (1,)
    torch.save({"weight": torch.ones(2)}, tmp_path / "b.pt")
    file = TorchFile(tmp_path / "b.pt")
    assert torch.equal(read(file, "weight"), torch.ones(2))
    assert torch_file._tensor.__defaults__ is None


class Kind(torch.Tensor):
    """A tensor of a class of its own."""


def test_a_weight_of_another_class_is_an_error_and_extra_state_is_not(tmp_path):
    path = tmp_path / "a.pt"
    extra = {"a._extra_state": io.BytesIO(), "b._extra_state": torch.ones(2), "c": None}
    torch.save({"weight": torch.ones(2), **extra}, path)
    file = TorchFile(path)
    assert list(file.tensors(file.contents)) == ["weight"]
    torch.save({"weight": torch.ones(2).as_subclass(Kind)}, path)
    file = TorchFile(path)
    with pytest.raises(ParallelError, match=r"a\.pt: weight is a .*Kind, which is not read"):
        file.tensors(file.contents)


@pytest.mark.parametrize(
    "value",
    [{"b": torch.ones(2)}, [torch.ones(2)]],
    ids=["dict", "list"],
)
def test_tensors_further_in_are_not_passed_over(tmp_path, value):
    torch.save({"a": torch.ones(2), "more": value}, tmp_path / "a.pt")
    file = TorchFile(tmp_path / "a.pt")
    with pytest.raises(ParallelError, match=r"a\.pt: more is a (dict|list), which is not read"):
        file.tensors(file.contents)


def test_any_byte_of_the_archive_that_changes_is_seen_or_does_not_matter(tmp_path):
    path, weights = tmp_path / "a.pt", {"a": torch.randn(9), "b": torch.randn(3, 3)}
    torch.save(weights, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        heads = list(range(archive.start_dir, len(whole)))
        for info in archive.infolist():
            heads += range(info.header_offset, info.header_offset + 30 + len(info.filename))
    seen = 0
    for at in heads:
        for flip in (1, 8, 128):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            try:
                file = TorchFile(path)
                assert list(file.tensors(file.contents)) == list(weights)
            except ParallelError:
                seen += 1
            else:
                for name, value in weights.items():
                    assert torch.equal(read(file, name), value), (at, flip)
    assert seen > len(heads) / 2


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [((-1,), (1,), 0), ((2,), (-1,), 3), ((2.0,), (1,), 0), ((2,), (1, 1), 0), ((2,), (1,), "0")],
)
def test_what_is_no_tensor_is_damage(tmp_path, size, stride, offset):
    class No:
        def __reduce__(self):
            storage = torch.ones(4).untyped_storage()
            made = torch.storage.TypedStorage(
                wrap_storage=storage, dtype=torch.float32, _internal=True
            )
            return torch._utils._rebuild_tensor_v2, (made, offset, size, stride, False, {})

    torch.save({"weight": No()}, tmp_path / "a.pt")
    with pytest.raises(ParallelError, match=r"a\.pt: its data\.pkl is damaged"):
        TorchFile(tmp_path / "a.pt")


def test_a_truncated_file_says_so(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.randn(100, 100)}, path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(
            ParallelError, match=rf"a\.pt: {size} bytes that are no whole .*truncated"
        ):
            TorchFile(path)


def test_other_files_say_what_they_are(tmp_path):
    with pytest.raises(ParallelError, match=r"gone\.pt: there is no such file"):
        TorchFile(tmp_path / "gone.pt")
    old = tmp_path / "old.pt"
    torch.save({"a": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(ParallelError, match=r"old\.pt: .*torch\.save \(torch 1\.6 or later\)"):
        TorchFile(old)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a/b", b"c")
    with pytest.raises(ParallelError, match=r"a\.zip: a zip archive without data\.pkl"):
        TorchFile(tmp_path / "a.zip")


def rewritten(path, change):
    """Write an archive again, with members that ``change`` returns."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    compression = change(members)
    with zipfile.ZipFile(path, "w", compression or zipfile.ZIP_STORED) as archive:
        for name, contents in members.items():
            archive.writestr(name, contents)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda members: zipfile.ZIP_DEFLATED, r"a/data.pkl is compressed, or ends"),
        (lambda members: members.update({"a/byteorder": b"big"}), r"byte order is 'big'"),
        (lambda members: members.update({"a/data.pkl": b"\x80\x02cx\n"}), r"data\.pkl is damaged"),
        (lambda members: members.update({"a/data.pkl": b""}), r"data\.pkl is damaged"),
    ],
    ids=["compressed", "big-endian", "half a pickle", "no pickle"],
)
def test_a_damaged_file_says_so(tmp_path, change, message):
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.randn(30)}, path)
    rewritten(path, change)
    with pytest.raises(ParallelError, match=rf"a\.pt: .*{message}|a\.pt: {message}"):
        TorchFile(path)


def test_a_storage_that_is_too_small_names_the_tensor(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"weight": torch.randn(30)}, path)
    rewritten(path, lambda members: members.update({"a/data/0": b"12345678"}))
    file = TorchFile(path)
    with pytest.raises(
        ParallelError, match=r"a\.pt: tensor weight of shape \(30,\) .* 120 bytes .* which has 8;"
    ):
        file.check("weight", file.contents["weight"])


def test_torch_load_reads_what_is_written(tmp_path):
    saved = {str(dtype): some(dtype, 13, 3) for dtype in DTYPES}
    saved |= {"number": torch.tensor(3), "empty": torch.zeros(0, 3), "vector": torch.randn(5)}
    path = tmp_path / "a.pth"
    write_torch_file(
        path,
        {
            name: (one.dtype, tuple(one.shape), one.split(4) if one.dim() else [one])
            for name, one in saved.items()
        },
    )
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert list(loaded) == list(saved)
        assert_same(loaded, saved)
    file = TorchFile(path)
    assert_same({name: read(file, name) for name in saved}, saved)
    with zipfile.ZipFile(path) as archive, path.open("rb") as opened:
        assert archive.testzip() is None
        for info in archive.infolist():  # so that a map of the file is aligned
            opened.seek(info.header_offset)
            name, extra = struct.unpack("<26xHH", opened.read(30))
            assert (info.header_offset + 30 + name + extra) % 64 == 0
