"""Files of torch.save and of safetensors, read and written a stretch at a time."""

import argparse
import enum
import io
import itertools
import json
import os
import random
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from files import assert_same, read, some, write_tensors

import ezpz_tp._formats
from ezpz_tp import ParallelError, Piece
from ezpz_tp._formats import Stored, strides_of, write, written
from ezpz_tp._formats.safetensors import DTYPES as NAMES
from ezpz_tp._formats.safetensors import open_safetensors
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


def test_what_torch_save_writes_is_read_bit_for_bit(tmp_path):
    saved = {f"{dtype} {shape}": some(dtype, *shape) for dtype in DTYPES for shape in ((7, 5), ())}
    torch.save(saved, tmp_path / "a.pt")
    file = tensors_in(tmp_path / "a.pt")
    assert_same({name: read(stored) for name, stored in file.items()}, saved)


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
    }
    torch.save(saved, tmp_path / "a.pt")
    file = tensors_in(tmp_path / "a.pt")
    for name, value in saved.items():
        assert torch.equal(read(file[name]), value.detach())
    for name, offsets, sizes in [
        ("transposed", (2, 0), (3, 20)),
        ("transposed", (0, 7), (6, 3)),
        ("columns", (4, 0), (9, 2)),
        ("columns", (1, 1), (19, 1)),
    ]:
        box = Piece(offsets, sizes)
        assert torch.equal(read(file[name], offsets, sizes), saved[name][box.slices])


def test_a_file_holds_more_than_tensors_and_nothing_of_it_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = {
        "model": {"weight": torch.ones(2)},
        "args": argparse.Namespace(swiglu=True, dtype=torch.bfloat16, color=Color.RED),
        "random": random.getstate(),
        "buffer": io.BytesIO(b"of Transformer Engine"),
        "shape": torch.ones(2, 3).shape,
        "set": {1, 2},
        "device": torch.device("cpu"),
    }
    torch.save(saved, "a.pt")
    contents = TorchFile(tmp_path / "a.pt").contents
    assert os.listdir(".") == ["a.pt"]
    assert (contents["args"].swiglu, contents["args"].dtype) == (True, torch.bfloat16)
    for foreign in (contents["args"].color, contents["buffer"]):
        assert isinstance(foreign, Foreign)
    assert contents["random"] == saved["random"]
    assert (contents["shape"], contents["set"]) == ((2, 3), {1, 2})
    assert contents["model"]["weight"].is_meta
    torch.save({**saved, "runs": Runs()}, "b.pt")
    with pytest.raises(ParallelError, match=r"b\.pt: its data\.pkl .*mkdir"):
        TorchFile(tmp_path / "b.pt")
    assert sorted(os.listdir(".")) == ["a.pt", "b.pt"]


def tensors_in(path):
    file = TorchFile(path)
    return file.tensors(file.contents)


def test_what_is_no_plain_tensor_is_an_error_and_extra_state_is_not(tmp_path):
    path = tmp_path / "a.pt"
    extra = {"a._extra_state": io.BytesIO(), "b._extra_state": torch.ones(2), "c": None}
    torch.save({"weight": torch.ones(2), **extra}, path)
    assert list(tensors_in(path)) == ["weight"]
    for value, kind in [
        ({"b": torch.ones(2)}, "dict"),
        ([torch.ones(2)], "list"),
    ]:
        torch.save({"weight": torch.ones(2), "more": value}, path)
        with pytest.raises(ParallelError, match=rf"a\.pt: more is a {kind}, which is not read"):
            tensors_in(path)


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
        for flip in (1, 128):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            try:
                found = tensors_in(path)
            except ParallelError:
                seen += 1
            else:
                assert list(found) == list(weights)
                for name, value in weights.items():
                    assert torch.equal(read(found[name]), value), (at, flip)
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
        tensors_in(tmp_path / "a.pt")


def test_other_files_say_what_they_are(tmp_path):
    path = tmp_path / "a.pt"
    with pytest.raises(ParallelError, match=r"a\.pt: there is no such file"):
        TorchFile(path)
    torch.save({"weight": torch.randn(100, 100)}, path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        message = rf"a\.pt: {size} bytes that are no whole .*truncated"
        with pytest.raises(ParallelError, match=message):
            TorchFile(path)
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ParallelError, match=r"a\.pt: .*torch\.save \(torch 1\.6 or later\)"):
        TorchFile(path)


STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
DAMAGES = [
    (DEFLATED, {}, r".*data\.pkl is compressed, or not where"),
    (STORED, {"a/byteorder": b"big"}, r"its byte order is 'big'"),
    (STORED, {"a/data.pkl": b"\x80\x02cx\n"}, r"its data\.pkl is damaged"),
    (STORED, {"a/data.pkl": b""}, r"its data\.pkl is damaged"),
    (STORED, {"a/data.pkl": None}, r"\d+ bytes that are no whole zip archive"),
    (STORED, {"a/data/0": b"12345678"}, r".*data/0 has 8 bytes; expected 120"),
]


@pytest.mark.parametrize(("compression", "members", "message"), DAMAGES)
def test_a_damaged_file_says_so(tmp_path, compression, members, message):
    path = tmp_path / "a.pt"
    torch.save({"w": torch.randn(30)}, path)
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()} | members
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, contents in held.items():
            if contents is not None:
                archive.writestr(name, contents)
    with pytest.raises(ParallelError, match=rf"a\.pt: {message}"):
        tensors_in(path)


def test_torch_load_reads_what_is_written(tmp_path):
    saved = {str(dtype): some(dtype, 13, 3) for dtype in DTYPES}
    saved |= {"number": torch.tensor(3), "empty": torch.zeros(0, 3), "vector": torch.randn(5)}
    path = tmp_path / "a.pth"
    parts = {name: one.split(4) if one.dim() else [one] for name, one in saved.items()}
    written = {name: (one.dtype, tuple(one.shape), parts[name]) for name, one in saved.items()}
    write_torch_file(path, written)
    for mmap in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mmap)
        assert list(loaded) == list(saved)
        assert_same(loaded, saved)
    assert_same({name: read(stored) for name, stored in tensors_in(path).items()}, saved)
    with zipfile.ZipFile(path) as archive, path.open("rb") as opened:
        assert archive.testzip() is None
        for info in archive.infolist():  # so that a map of the file is aligned
            opened.seek(info.header_offset)
            name, extra = struct.unpack("<26xHH", opened.read(30))
            assert (info.header_offset + 30 + name + extra) % 64 == 0


# Those of safetensors, and the library that has the format.


def some_tensors():
    named = {
        f"{name} {shape}": some(dtype, *shape)
        for name, dtype in NAMES.items()
        for shape in ((), (3,), (2, 0), (3, 5))
    }
    return {**named, 'a "quoted" name, ünïcode': torch.ones(2)}


def test_every_dtype_comes_back_bit_for_bit_also_from_the_library(tmp_path):
    tensors = some_tensors()
    path = write_tensors(tmp_path / "a", tensors, {"one": "1"})
    found, metadata = open_safetensors(path)
    assert metadata == {"one": "1"}
    assert_same({name: read(stored) for name, stored in found.items()}, tensors)
    assert all(stored.at % stored.dtype.itemsize == 0 for stored in found.values())

    library = pytest.importorskip("safetensors.torch")
    assert_same(library.load_file(path), tensors)
    with library.safe_open(path, "pt") as file:
        assert file.metadata() == {"one": "1"}
    library.save_file(tensors, tmp_path / "b", {"two": "2"})
    ours, metadata = open_safetensors(tmp_path / "b")
    assert metadata == {"two": "2"}
    assert_same({name: read(stored) for name, stored in ours.items()}, tensors)
    empty = write_tensors(tmp_path / "c", {})
    assert library.load_file(empty) == {} == open_safetensors(empty)[0]


# Bytes at a time, and where most of what is read is not wanted.
@pytest.mark.parametrize("sizes", [(16 << 20, 1 << 16), (64, 0), (8, 8), (240, 48)], ids=str)
@pytest.mark.parametrize("shape", [(6, 5), (3, 2, 3, 2), (7,)], ids=str)
def test_any_box_is_read_into_any_strides(tmp_path, monkeypatch, sizes, shape):
    for name, size in zip(("CHUNK", "_NEAR"), sizes, strict=True):
        monkeypatch.setattr(ezpz_tp._formats, name, size)
    full = some(torch.float64, *shape)
    with written(tmp_path / "file") as file:
        file.write(bytes(8))
        write(file, full)
    stored = Stored(tmp_path / "file", full.dtype, shape, strides_of(shape), 8)
    ranges = [itertools.combinations(range(size + 1), 2) for size in shape]
    boxes = list(itertools.product(*ranges))
    for ends in boxes[:: max(1, len(boxes) // 100)]:
        box = Piece(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))
        for out in outs_like(full[box.slices]):
            stored.read(box, out)
            assert_same({"": out}, {"": full[box.slices]})


def outs_like(wanted):
    """Memory of three kinds: in order, in reverse order, and with gaps."""
    yield torch.zeros(wanted.shape, dtype=wanted.dtype)
    order = tuple(reversed(range(wanted.dim())))
    yield torch.zeros(wanted.shape[::-1], dtype=wanted.dtype).permute(order)
    gaps = torch.zeros([2 * size for size in wanted.shape], dtype=wanted.dtype)
    yield gaps[(slice(0, None, 2),) * wanted.dim()]


def test_a_dtype_that_the_format_has_not(tmp_path):
    with pytest.raises(ParallelError, match=r"'c' has torch.complex128, .* does not know"):
        write_tensors(tmp_path / "a", {"c": torch.zeros((), dtype=torch.complex128)})


def damaged(content, length, header):
    text = json.dumps(header).encode()

    def changed(**others):
        said = json.dumps({**header, **others}).encode()
        return len(said).to_bytes(8, "little") + said + bytes(16)

    def with_x(**others):
        return changed(x={**header["x"], **others})

    return {
        "it is truncated, or no safetensors file": b"abc",
        "has 40 bytes; expected 8 and a header of": content[:40],
        rf"has {length - 3} bytes; expected {length}, .* within or before tensor 'x' \(4,\)": (
            content[:-3]
        ),
        f"has {length + 5} bytes; expected {length}, as its header says$": content + b"12345",
        "its header is not that of safetensors": content.replace(b'"dtype"', b'"dtypo"'),
        "its header is not that of safetensors: Expecting": content.replace(b'{"', b"{{", 1),
        r"tensor 'x' of torch.float32 and shape \(5,\) is said to have 16 bytes; expected 20": (
            with_x(shape=[5])
        ),
        "dtype 'F4' is none of F64": with_x(dtype="F4"),
        r"tensor 'y' is said to begin at byte \d+; expected \d+, where the one": (
            changed(y={**header["x"], "data_offsets": [8, 24]})
        ),
        r"found \[4.0\], expected whole numbers": with_x(shape=[4.0]),
        r"found \[-4\], expected whole numbers": with_x(shape=[-4]),
        "header is not that of safetensors: 'int' object": changed(__metadata__=5),
        "of 9223372036854775807: it is truncated": (2**63 - 1).to_bytes(8, "little") + text,
    }


def test_damaged_files_are_known_before_a_tensor_is_read(tmp_path):
    path = write_tensors(tmp_path / "a.safetensors", {"x": torch.arange(4.0)})
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for message, found in damaged(content, len(content), header).items():
        path.write_bytes(found)
        with pytest.raises(ParallelError, match=rf"a\.safetensors: .*{message}"):
            open_safetensors(path)
    path.unlink()
    with pytest.raises(ParallelError, match="there is no such file"):
        open_safetensors(path)


def test_a_file_cut_while_it_is_read_is_said(tmp_path):
    path = write_tensors(tmp_path / "a", {"x": torch.arange(4.0)})
    tensors, _ = open_safetensors(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(ParallelError, match=r"a: ends at byte \d+, 4 bytes before a tensor does"):
        read(tensors["x"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
def test_a_full_disk_names_the_file():
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        write_tensors(Path("/dev/full"), {"x": torch.ones(4)})
