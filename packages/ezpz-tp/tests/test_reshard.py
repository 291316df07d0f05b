"""From files to files: shards of the release before, and folders of torch's, at other degrees."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from files import INDEX, pieces_in, torch_finds, write_old_shards, write_tensors
from test_state_dict import Model, Stage, adam_of, assert_same
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import ezpz_tp
from ezpz_tp import DegreeError, ParallelError, Piece, _reshard, reshard
from ezpz_tp._formats.safetensors import open_safetensors
from ezpz_tp._reshard import open_source
from ezpz_tp._shard import Entry, Shard
from ezpz_tp._state_dict import Held, gather_state_dict, survey
from ezpz_tp.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*reads no folders with shards.json:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]
EXTRA = {"step": 2, "rates": [0.1, None]}
FIRST, SECOND = "pp00-tp00.safetensors", "pp00-tp01.safetensors"


def write_old(path, make=Model, tp=4, pp=1):
    """Write shards of the release before; return the whole state."""

    def write():
        module = make()
        optimizer = adam_of(module)
        full = gather_state_dict(module, optimizer=optimizer)
        _, whole = survey(module, optimizer, ezpz_tp.get_state())
        stages = dict.fromkeys(whole.tensors, (0,))
        if pp > 1:  # the layers on the last, and what is tied on both
            stages |= {name: (pp - 1,) for name in stages if "layers" in name}
            stages |= {name: (0, pp - 1) for name in stages if "embedding" in name}
        held = {name: one._replace(stages=stages[name]) for name, one in whole.tensors.items()}
        write_old_shards(path, full, held, tp, pp, whole.groups, extra=EXTRA)
        return full

    return run_ranks(write, 1)[0]


def load_by_torch(path, make):
    module = make()
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers()]:
            value.fill_(7)
    optimizer = adam_of(module, lr=0.25, betas=(0.1, 0.2))
    for state in optimizer.state.values():
        for value in state.values():
            value.fill_(7)
    held = ezpz_tp.dtensor_state_dict(module, optimizer=optimizer, loading=True)
    held["extra"] = {"step": 0}
    dcp.load(held, checkpoint_id=path)
    assert held.pop("extra") == {"step": 2}
    ezpz_tp.load_dtensor_state_dict(module, held, optimizer=optimizer)
    return gather_state_dict(module, optimizer=optimizer)


@pytest.mark.parametrize(("make", "pp"), [(Model, 1), (lambda: Stage(0, 1), 2)], ids=["all", "pp"])
def test_shards_of_the_release_before_are_read_bit_for_bit(tmp_path, make, pp):
    """Gates above up projections, queries above fewer keys and values, an odd vocabulary."""
    full = write_old(tmp_path / "old", make, pp=pp)
    last = tmp_path / "old"
    for tp in (2, 8, 1, 4):
        reshard(last, tmp_path / f"{tp}", tp=tp)  # the second one reads what the first wrote
        last = tmp_path / f"{tp}"
        files = sorted(os.listdir(last))
        assert files == [".metadata", *(f"__{rank}_0.distcp" for rank in range(tp))]
        assert_same(load_by_torch(last, make), full)


@pytest.mark.skipif(find_spec("numpy") is None, reason="no numpy")
def test_ranks_load_what_was_written_for_more_of_them(tmp_path):
    full = write_old(tmp_path / "old", tp=2)
    reshard(tmp_path / "old", tmp_path / "4", tp=4)
    for found in run_ranks(load_by_torch, 2, tmp_path / "4", Model, in_processes=True):
        assert_same(found, full)


def test_each_file_has_what_its_rank_holds(tmp_path):
    write_old(tmp_path / "old", tp=1)
    reshard(tmp_path / "old", tmp_path / "4", tp=4)
    pieces = pieces_in(tmp_path / "4")
    for rank in range(4):
        assert pieces["model.embedding.weight", rank] == (
            (12 * rank, 0),
            (9 if rank > 2 else 12, 16),
        )
        assert pieces["model.qkv.weight.block0", rank] == ((8 * rank, 0), (8, 16))
        assert pieces["model.down.weight.block1", rank] == ((0, 2 * rank), (16, 2))
    assert sum(key == "model.norm.weight" for key, _ in pieces) == 1
    found = torch_finds(tmp_path / "4")["optimizer"]["param_groups"]["norm.weight"]
    assert (found["lr"], found["betas"]) == (0.5, (0.9, 0.999))


def test_what_is_no_ordinary_tensor(tmp_path):
    full = {"weight": torch.zeros(0, 3), "number": torch.tensor(2.5)}
    shards = {"weight": Shard((0, 3), 1), "number": Shard(())}
    held = {name: Held(Entry(name, torch.float32, one), (0,)) for name, one in shards.items()}
    values = {"_extra_state": {"seen": 4}}
    write_old_shards(tmp_path / "old", full, held, 1, values=values)
    reshard(tmp_path / "old", tmp_path / "3", tp=3)
    assert_same(torch_finds(tmp_path / "3"), {**full, **values})


# Folders of torch's, whatever wrote them.


def write_by_hand(folder, full, boxes, **change):
    """Write what torch.distributed.checkpoint would, a piece for each box."""
    folder.mkdir()
    chunks, storage = [], {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for offsets, sizes in boxes:
            start = file.tell()
            piece = full[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
            torch.save(piece.clone(), file)
            info = _StorageInfo("__0_0.distcp", start, file.tell() - start)
            for name, value in change.items():
                setattr(info, name, value)
            storage[MetadataIndex("weight", torch.Size(offsets))] = info
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    about = TensorStorageMetadata(TensorProperties(dtype=full.dtype), full.size(), chunks)
    metadata = Metadata({"weight": about}, {"weight": ("weight",)}, storage)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_pieces_of_several_dims_are_read(tmp_path):
    full = torch.randn(6, 8)
    boxes = [((a, b), (4 - a // 2, n)) for a in (0, 4) for b, n in ((0, 5), (5, 3))]
    write_by_hand(tmp_path / "in", full, boxes)
    source = open_source(tmp_path / "in")
    for box in (Piece((0, 0), (6, 8)), Piece((1, 0), (4, 8)), Piece((3, 2), (1, 5))):
        out = torch.zeros(box.sizes)
        source.read("weight", box, out)
        assert torch.equal(out, full[box.slices])
    reshard(tmp_path / "in", tmp_path / "out", tp=2)
    assert torch.equal(torch_finds(tmp_path / "out")["weight"], full)


class Runs:
    def __reduce__(self):
        return os.mkdir, ("/tmp/that a file has made",)


def scribble(path):
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:-40])


def run(path):
    (path / ".metadata").write_bytes(pickle.dumps(Runs()))


def shorten(path):
    os.truncate(path / "__0_0.distcp", 300)


def exchange(path):
    buffer = io.BytesIO()
    torch.save(torch.zeros(6, 9), buffer)
    (path / "__0_0.distcp").write_bytes(buffer.getvalue())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (scribble, r"\.metadata: is damaged"),
        (run, r"\.metadata: is damaged: AttributeError\(\".* has no attribute 'planner_data'"),
        (shorten, r"__0_0\.distcp: \d+ bytes that are no whole zip archive"),
        (lambda path: (path / "__0_0.distcp").unlink(), r"__0_0\.distcp"),
        (exchange, r"at byte 0 is \(\(6, 9\), torch.float32\); expected .* \(\(6, 8\), "),
    ],
    ids=["metadata", "code", "short", "gone", "other"],
)
def test_damaged_folders_of_torchs_are_said_and_nothing_is_run(tmp_path, damage, message):
    write_by_hand(tmp_path / "in", torch.ones(6, 8), [((0, 0), (6, 8))])
    damage(tmp_path / "in")
    with pytest.raises((ParallelError, OSError), match=message):
        reshard(tmp_path / "in", tmp_path / "out", tp=1)
    assert os.listdir(tmp_path) == ["in"]
    assert not os.path.exists("/tmp/that a file has made")


@pytest.mark.parametrize("change", [{"relative_path": "../x"}, {"transform_descriptors": ["zstd"]}])
def test_files_elsewhere_and_compressed_ones_are_refused(tmp_path, change):
    write_by_hand(tmp_path / "in", torch.ones(6, 8), [((0, 0), (6, 8))], **change)
    with pytest.raises(ParallelError, match="expected a file of the folder, not compressed"):
        open_source(tmp_path / "in")


# Old files that are not what they should be: an error that says what, and nothing written.


@pytest.fixture
def saved(tmp_path):
    write_old(tmp_path / "saved", lambda: Stage(0, 1), tp=2)
    return tmp_path / "saved"


def rewrite(path, change, metadata=None):
    """Write a file again with other tensors."""
    stored, old = open_safetensors(path)
    tensors = {name: torch.ones(one.shape, dtype=one.dtype) for name, one in stored.items()}
    change(tensors)
    write_tensors(path, tensors, metadata or old)


def change_index(path, change):
    said = json.loads((path / INDEX).read_text())
    change(said)
    (path / INDEX).write_text(json.dumps(said))


LAYER = "layers.3.weight"
DAMAGES = {
    rf"{SECOND}: there is no such file": lambda path: (path / SECOND).unlink(),
    rf"{SECOND}: has \d+ bytes; expected \d+, as its header says. It is truncated": lambda path: (
        os.truncate(path / SECOND, (path / SECOND).stat().st_size - 10)
    ),
    rf"{SECOND}: has 100 bytes; expected 8 and a header of \d+: it is truncated": lambda path: (
        os.truncate(path / SECOND, 100)
    ),
    rf"{SECOND}: has no tensor '{LAYER}' of shape \(8, 16\) .*, rank 1 of 2's part of "
    r"\(16, 16\); "
    "found none of that name": lambda path: rewrite(path / SECOND, lambda held: held.pop(LAYER)),
    rf"{SECOND}: has no tensor '{LAYER}' of shape \(8, 16\) and torch.float16, .*; found "
    r"\(\(16, 16\), torch.float16": lambda path: rewrite(
        path / SECOND, lambda tensors: tensors.update({LAYER: torch.ones(16, 16).half()})
    ),
    rf"{SECOND}: has no tensor '{LAYER}' of shape \(8, 16\) and torch.float16, .*; found "
    r"\(\(8, 16\), torch.float32": lambda path: rewrite(
        path / SECOND, lambda tensors: tensors.update({LAYER: torch.ones(8, 16)})
    ),
    rf"{SECOND}: is of save, tp, .* \['a word', 0, 2, 0, 1\]; expected \['a word', 1, 2,": (
        lambda path: (path / SECOND).write_bytes((path / FIRST).read_bytes())
    ),
    rf"{SECOND}: is of save, tp, .* \[None, None, None, None, None\]": lambda path: rewrite(
        path / SECOND, lambda _: None, {"format": "pt"}
    ),
    rf"{FIRST}: has no tensor '{LAYER}' of shape \(16, 16\) .*; found \(\(8, 16\)": lambda path: (
        change_index(path, lambda said: said["tensors"][LAYER].update(shape=[32, 16]))
    ),
    rf"{FIRST}: has no tensor 'more' of shape \(16,\)": lambda path: change_index(
        path, lambda said: said["tensors"].update(more=said["tensors"]["norm.weight"])
    ),
    rf"{INDEX}: it does not say what it should: KeyError\('save'\)": lambda path: change_index(
        path, lambda said: said.pop("save")
    ),
    rf"{INDEX}: it does not say what it should: DegreeError": lambda path: change_index(
        path, lambda said: said["tensors"][LAYER].update(dim=2)
    ),
    rf"{INDEX}: is of format 'ezpz_tp shards', version 2; expected .* version 1": lambda path: (
        change_index(path, lambda said: said.update(version=2))
    ),
    rf"{INDEX}: not JSON": lambda path: (path / INDEX).write_text("{"),
    rf"{INDEX}: .*ValueError.'{LAYER} is on stages \(1,\) of 1": lambda path: change_index(
        path, lambda said: said["tensors"][LAYER].update(stages=[1])
    ),
    rf"{INDEX}: .*found \[16.0, 16\], expected whole numbers": lambda path: change_index(
        path, lambda said: said["tensors"][LAYER].update(shape=[16.0, 16])
    ),
    rf"{SECOND}: its metadata are damaged": lambda path: (path / SECOND).write_bytes(
        (path / SECOND).read_bytes().replace(rb'"ezpz_tp":"{', rb'"ezpz_tp":"!')
    ),
    "saved: not a checkpoint of a known format .* found pp00-tp00.* A save that was interrupted": (
        lambda path: (path / INDEX).unlink()
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", DAMAGES, ids=range(len(DAMAGES)))
def test_damaged_files_are_said_and_nothing_is_written(saved, message):
    DAMAGES[message](saved)
    before = {path: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(ParallelError, match=message):
        reshard(saved, saved.with_name("out"), tp=1)
    assert {path: path.read_bytes() for path in saved.iterdir()} == before
    assert os.listdir(saved.parent) == ["saved"]


def test_a_folder_that_a_link_leads_to_is_written(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    for target in ("empty", "gone"):
        (tmp_path / f"to {target}").symlink_to(tmp_path / target)
        reshard(saved, tmp_path / f"to {target}", tp=1)
        assert sorted(os.listdir(tmp_path / target)) == [".metadata", "__0_0.distcp"]


def test_degrees_that_do_not_fit_are_said_and_nothing_is_written(saved, tmp_path):
    def fails(message, kind=DegreeError, **degrees):
        with pytest.raises(kind, match=message):
            reshard(saved, tmp_path / "out", **degrees)

    fails(
        r"'layers.0.weight': dim 0 of a tensor of full shape \(16, 16\) .* 16 over degree 3", tp=3
    )
    fails("tp=0; expected at least 1", tp=0)
    with pytest.deprecated_call(match="any number of stages loads what it writes"):
        fails("pp=0; expected at least 1", tp=1, pp=0)
    with pytest.raises(ParallelError, match=r"nowhere: not a checkpoint.* no such file or folder"):
        reshard(tmp_path / "nowhere", tmp_path / "out", tp=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ParallelError, match=r"empty: not a checkpoint.* the folder is empty"):
        open_source(tmp_path / "empty")
    (tmp_path / "empty").rmdir()
    assert os.listdir(tmp_path) == ["saved"]
    # Nothing is overwritten.
    with pytest.raises(ParallelError, match="saved: exists, and is not an empty folder"):
        reshard(saved, saved, tp=1)
    (tmp_path / "out").mkdir()
    reshard(saved, tmp_path / "out", tp=1)
    assert sorted(os.listdir(tmp_path)) == ["out", "saved"]


class Failing:
    """A source whose file system fails in the middle."""

    def __init__(self):
        self.metadata = {}
        self.entries = {name: Entry(name, torch.float32, Shard((4,))) for name in ("a", "b")}

    def read(self, name, box, out):
        if name == "b":
            raise OSError("Input/output error")
        out.fill_(box.offsets[0])


def test_an_error_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(_reshard, "open_source", lambda *_: Failing())
    with pytest.raises(OSError, match="Input/output error"):
        reshard("in", tmp_path / "new" / "out", tp=2)
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]


# Memory and what is seen of it.

PEAK = """
import sys
from pathlib import Path
from ezpz_tp import reshard

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024  # of this program alone

import torch
torch.zeros(1).sum()
before = peak()
reshard(sys.argv[1], sys.argv[2], tp=int(sys.argv[3]))
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("tp", [1, 4])
def test_no_more_than_the_largest_tensor_is_in_memory(tmp_path, tp):
    dtype, large, small = torch.bfloat16, Shard((10_000, 8_192), 1), Shard((20_000, 1_024), 0)
    shards = {"weight": large, "optimizer/weight/exp_avg": small}  # of 164 MB, of 41 MB
    held = {name: Held(Entry(name, dtype, shard), (0,)) for name, shard in shards.items()}
    folder = tmp_path / "saved"
    write_old_shards(folder, None, held, 2)  # all holes: no disk
    command = [sys.executable, "-c", PEAK, str(folder), str(tmp_path / "out"), str(tp)]
    found = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    shutil.rmtree(tmp_path / "out")  # 200 MB, which pytest would keep
    size = 2 * 10_000 * 8_192
    assert size <= found <= 1.2 * size + 200e6


def test_progress_is_shown_on_a_terminal_only(saved, tmp_path, monkeypatch, capsys):
    reshard(saved, tmp_path / "a", tp=1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(_reshard.sys.stderr, "isatty", lambda: True)
    reshard(saved, tmp_path / "b", tp=1, progress=False)
    assert capsys.readouterr().err == ""
    reshard(saved, tmp_path / "c", tp=1)
    assert "\rresharding: 45 of 45 tensors, 0.0 of 0.0 GB" in capsys.readouterr().err
