"""Files of tensors, written and read a piece at a time, and the library that has the format."""

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from files import assert_same, read, some, write_tensors

import ezpz_tp._formats
from ezpz_tp import ParallelError, Piece
from ezpz_tp._formats import Stored, strides_of, write, written
from ezpz_tp._formats.safetensors import DTYPES, open_safetensors


def some_tensors():
    named = {
        f"{name} {shape}": some(dtype, *shape)
        for name, dtype in DTYPES.items()
        for shape in ((), (3,), (2, 0), (3, 5))
    }
    return {**named, 'a "quoted" name, ünïcode': torch.ones(2)}


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    path = write_tensors(tmp_path / "a", some_tensors(), {"one": "1"})
    found, metadata = open_safetensors(path)
    assert metadata == {"one": "1"}
    assert_same({name: read(stored) for name, stored in found.items()}, some_tensors())
    assert all(stored.at % stored.dtype.itemsize == 0 for stored in found.values())


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    from safetensors import safe_open

    tensors = some_tensors()
    assert_same(library.load_file(write_tensors(tmp_path / "a", tensors, {"one": "1"})), tensors)
    with safe_open(tmp_path / "a", "pt") as file:
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
