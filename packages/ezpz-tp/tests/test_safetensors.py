"""Files of tensors, written and read a piece at a time, and the library that has the format."""

import itertools
import json
import os

import pytest
import torch

from ezpz_tp import ParallelError
from ezpz_tp._formats import stretches
from ezpz_tp._formats.safetensors import DTYPES, TensorFile, TensorWriter
from ezpz_tp._formats.stretches import Region, read_stretch, write_stretch
from ezpz_tp._shard import Piece


def random_bytes(shape, dtype, seed=0):
    """Values of any bits: NaNs with payloads, negative zeros and denormals among them."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    values = torch.randint(high, (count,), generator=generator, dtype=torch.uint8)
    return values.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def whole(tensor):
    return Piece((0,) * tensor.dim(), tuple(tensor.shape))


def bytes_of(tensor):
    return bytes(tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8))


def same(found, expected):
    """Whether tensors are equal to the last bit."""
    alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return alike and bytes_of(found) == bytes_of(expected)


def some_tensors():
    named = {
        f"{name} {shape}": random_bytes(shape, dtype)
        for name, dtype in DTYPES.items()
        for shape in ((), (3,), (2, 0), (3, 5))
    }
    return {**named, 'a "quoted" name, ünïcode': torch.ones(2)}


def write(path, tensors, metadata=None):
    said = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with TensorWriter(path, said, metadata) as writer:
        for name, tensor in reversed(tensors.items()):
            writer.write(name, tensor)
    assert writer.size == path.stat().st_size
    return path


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    tensors = some_tensors()
    file = TensorFile.open(write(tmp_path / "a.safetensors", tensors, {"one": "1"}))
    assert file.metadata == {"one": "1"}
    assert file.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        out = torch.empty_like(expected)
        file.read(name, whole(out), out)
        assert same(out, expected), name
        stored = file.tensors[name]
        assert stored.start % stored.dtype.itemsize == 0
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    from safetensors import safe_open

    tensors = some_tensors()
    theirs = set(library.load_file(write(tmp_path / "a", tensors, {"one": "1"})))
    assert theirs == tensors.keys()
    with safe_open(tmp_path / "a", "pt") as file:
        assert file.metadata() == {"one": "1"}
        for name, expected in tensors.items():
            assert same(file.get_tensor(name), expected), name
    library.save_file(tensors, tmp_path / "b", {"two": "2"})
    ours = TensorFile.open(tmp_path / "b")
    assert ours.metadata == {"two": "2"}
    assert ours.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        out = torch.empty_like(expected)
        ours.read(name, whole(out), out)
        assert same(out, expected), name
    empty = write(tmp_path / "c", {})
    assert library.load_file(empty) == {} == TensorFile.open(empty).tensors


# Bytes at a time; the shortest stretch that is read by itself; how near the next may be.
SIZES = [
    (stretches.CHUNK, stretches._SHORT, stretches._NEAR),
    (64, 0, 0),
    (8, 0, 0),
    (240, 240, 240),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("shape", [(6, 5), (2, 5, 3), (3, 2, 3, 2), (7,)], ids=str)
def test_any_stretch_is_read_and_written_into_any_strides(tmp_path, monkeypatch, sizes, shape):
    for name, size in zip(("CHUNK", "_SHORT", "_NEAR"), sizes, strict=True):
        monkeypatch.setattr(stretches, name, size)
    full = random_bytes(shape, torch.float64)
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        region = Region(file, 8, shape)
        for dim, size in enumerate(shape):
            for start, stop in itertools.combinations(range(size + 1), 2):
                write_stretch(region, 0, 0, full)
                wanted = full.narrow(dim, start, stop - start)
                for out in outs_like(wanted):
                    read_stretch(region, dim, start, out)
                    assert same(out, wanted)
                    changed = out.copy_(wanted.flip(dim))
                    write_stretch(region, dim, start, changed)
                    whole = torch.empty_like(full)
                    read_stretch(region, 0, 0, whole)
                    expected = full.clone()
                    expected.narrow(dim, start, stop - start).copy_(changed)
                    assert same(whole, expected)
                    write_stretch(region, dim, start, wanted)


def outs_like(wanted):
    """Memory of three kinds: in order, in reverse order, and with gaps."""
    yield torch.zeros(wanted.shape, dtype=wanted.dtype)
    order = tuple(reversed(range(wanted.dim())))
    yield torch.zeros(wanted.shape[::-1], dtype=wanted.dtype).permute(order)
    gaps = torch.zeros([2 * size for size in wanted.shape], dtype=wanted.dtype)
    yield gaps[(slice(0, None, 2),) * wanted.dim()]


def test_what_is_not_written_is_zero(tmp_path):
    with TensorWriter(tmp_path / "a", {"x": (torch.float32, (4, 2))}) as writer:
        writer.write("x", torch.ones(1, 2), start=2)
    out = torch.empty(4, 2)
    TensorFile.open(tmp_path / "a").read("x", whole(out), out)
    assert out.tolist() == [[0, 0], [0, 0], [1, 1], [0, 0]]


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = write(tmp_path / "a", {"x": torch.ones(2)})
    before = path.read_bytes()
    with pytest.raises(KeyError), TensorWriter(path, {"y": (torch.int8, (3,))}) as writer:
        writer.write("z", torch.ones(3, dtype=torch.int8))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(ParallelError, match=r"'c' has torch.complex128, .* does not know"):
        TensorWriter(path, {"c": (torch.complex128, ())})


def damaged(content, length, header):
    """Files that are no longer what they were, and what is said of them."""
    text = json.dumps(header).encode()
    wrong = dict(header, x={**header["x"], "shape": [5]})
    other = dict(header, y={**header["x"], "data_offsets": [8, 24]})
    unknown = dict(header, x={**header["x"], "dtype": "F4"})
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
            _file(wrong)
        ),
        "dtype 'F4' is none of F64": _file(unknown),
        r"tensor 'y' is said to begin at byte \d+; expected \d+, where the one": _file(other),
        r"found \[4.0\], expected whole numbers": _file({"x": {**header["x"], "shape": [4.0]}}),
        r"found \[-4\], expected whole numbers": _file({"x": {**header["x"], "shape": [-4]}}),
        "header is not that of safetensors: 'int' object": _file({"__metadata__": 5}),
        "of 9223372036854775807: it is truncated": (2**63 - 1).to_bytes(8, "little") + text,
    }


def _file(header):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


def test_damaged_files_are_known_before_a_tensor_is_read(tmp_path):
    path = write(tmp_path / "a.safetensors", {"x": torch.arange(4.0)})
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for message, found in damaged(content, len(content), header).items():
        path.write_bytes(found)
        with pytest.raises(ParallelError, match=rf"a\.safetensors: .*{message}"):
            TensorFile.open(path)
    path.unlink()
    with pytest.raises(ParallelError, match="there is no such file"):
        TensorFile.open(path)


def test_a_file_cut_while_it_is_read_is_said(tmp_path):
    path = write(tmp_path / "a", {"x": torch.arange(4.0)})
    file = TensorFile.open(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(ParallelError, match=r"a: ends at byte \d+, 4 bytes before a tensor does"):
        file.read("x", Piece((0,), (4,)), torch.empty(4))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
def test_a_full_disk_names_the_file():
    with open("/dev/full", "wb", buffering=0) as file:  # noqa: SIM117
        with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
            write_stretch(Region(file, 0, (4,)), 0, 0, torch.ones(4))
