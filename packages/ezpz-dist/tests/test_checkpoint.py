"""Checkpoints of one process: what is on disk, what is damaged, what is hostile."""

import collections
import dataclasses
import datetime as dt
import enum
import errno
import io
import json
import logging
import os
import pickle
import re
import shutil
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from ezpz_dist import (
    CheckpointError,
    Saving,
    finish_saving,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from ezpz_dist._checkpoints import files, owner, save
from ezpz_dist._checkpoints.disk_format import DataWriter
from ezpz_dist._checkpoints.owner import find_this_process
from ezpz_dist._checkpoints.pieces import find_pieces
from ezpz_dist._checkpoints.plan import Holding, list_items, pack_items, plan_writers


def fresh(seed=2):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))


@pytest.fixture
def model():
    return fresh(1)


@pytest.fixture
def optimizer(model):
    made = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 5)).sum().backward()
    made.step()
    return made


def refused(match, call, *args, **given):
    with pytest.raises(CheckpointError, match=match):
        call(*args, **given)


def entries(folder):
    """What is there beside the file that says who saves there."""
    return sorted(set(os.listdir(folder)) - {"owner.json"})


def equal(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def test_the_first_start_finds_none(tmp_path, model):
    assert load_checkpoint(tmp_path / "new", model=model) is None
    assert latest_checkpoint(tmp_path / "new") is None
    assert list_checkpoints(tmp_path / "new") == []
    assert not (tmp_path / "new").exists()
    said = r"no checkpoint of step 4 in .*/new; .*: none"
    refused(said, load_checkpoint, tmp_path / "new", model=model, step=4)
    refused(r"no checkpoint in .*/new", verify_checkpoint, tmp_path / "new")


def test_everything_comes_back(tmp_path, model, optimizer, caplog):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    position = {"at": 3}
    with caplog.at_level(logging.INFO, "ezpz_dist"):
        saving = save_checkpoint(
            tmp_path / "c", model=model, optimizer=optimizer, scheduler=scheduler, step=7,
            data=position, extra={"best": 0.5, "shape": (2, 3), "t": torch.ones(2)},
        )  # fmt: skip
    assert saving.done
    assert saving.wait() == saving.folder == str(tmp_path / "c/step-00000007")
    assert re.search(r"step 7 saved at once to .* MB from 1 ranks in .* MB/s", caplog.text)
    drawn = torch.rand(3)

    other = fresh()
    theirs = torch.optim.AdamW(other.parameters(), lr=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(theirs, 3)
    at = {}
    given = {"model": other, "optimizer": theirs, "scheduler": schedule, "data": at}
    loaded = load_checkpoint(tmp_path / "c", **given)
    assert torch.equal(torch.rand(3), drawn)
    assert equal(other, model)
    assert at == loaded.data == position
    assert theirs.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    for mine, old in zip(theirs.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], old[key]) for key in old)
    assert schedule.state_dict() == scheduler.state_dict()
    assert (loaded.step, loaded.world_size, loaded.notes, loaded.skipped) == (7, 1, (), ())
    assert loaded.extra["shape"] == (2, 3)
    assert torch.equal(loaded.extra["t"], torch.ones(2))

    found = verify_checkpoint(tmp_path / "c")
    assert found == latest_checkpoint(tmp_path / "c") == verify_checkpoint(saving.folder)
    assert found.contents == ("model", "optimizer", "scheduler", "data", "extra", "rng")
    # An evaluation wants the model alone.
    assert load_checkpoint(tmp_path / "c", model=fresh(), rng=False).step == 7


def test_the_model_s_device_keeps_its_random_stream_without_setup_torch(tmp_path, monkeypatch):
    class There(nn.Parameter):
        device = torch.device("xpu", 1)  # not the current one

    streams = {There.device: torch.tensor([7])}
    monkeypatch.setattr(torch.xpu, "get_rng_state", lambda device: streams[device].clone())
    put = lambda state, device: streams.update({device: state})  # noqa: E731
    monkeypatch.setattr(torch.xpu, "set_rng_state", put)
    there, here = (nn.ParameterList([kind(torch.ones(2))]) for kind in (There, nn.Parameter))
    save_checkpoint(tmp_path, model=there, step=1)
    streams[There.device] = torch.tensor([8])
    assert load_checkpoint(tmp_path, model=there).notes == ()
    assert streams[There.device] == 7
    save_checkpoint(tmp_path, model=here, step=2)
    said = "random numbers on xpu stay as they are: saved on cpu"
    assert load_checkpoint(tmp_path, model=there).notes == (said,)
    assert streams[There.device] == 7


def test_common_types_in_extra_come_back_as_plain_ones(tmp_path, model):
    numpy = pytest.importorskip("numpy")
    at = dt.datetime(2024, 5, 6, 7, 8, tzinfo=dt.UTC)
    extra = {
        "best": numpy.float64(0.5), "seen": [numpy.int64(3), numpy.bool_(True)],
        "since": numpy.datetime64("2024-05-06"), "to": Path("runs") / "a", Path("b"): 1,
        "mode": Mode.FAST, "at": (at, at.date(), at.time(), dt.timedelta(minutes=1)),
        "place": {"point": Point(1, numpy.float32(0.25)), "t": torch.ones(2)},
    }  # fmt: skip
    save_checkpoint(tmp_path, model=model, step=1, extra=extra)
    found = load_checkpoint(tmp_path, model=model).extra
    assert torch.equal(found["place"].pop("t"), torch.ones(2))
    expected = {
        "best": 0.5, "seen": [3, True], "since": "2024-05-06", "to": "runs/a", "b": 1,
        "mode": "fast", "at": ("2024-05-06T07:08:00+00:00", "2024-05-06", "07:08:00", 60.0),
        "place": {"point": (1, 0.25)},
    }  # fmt: skip
    assert repr(found) == repr(expected)  # types, too


def test_types_that_json_lacks_come_back(tmp_path, model):
    extra = {
        "tuple": (1, (2.5, None)), "set": {1, 2}, "bytes": b"\0\xff", "complex": 1 - 2j,
        "counter": collections.Counter("aab"), "ordered": collections.OrderedDict(b=1, a=2),
        "odd": [float("inf"), float("-inf"), 1 << 80], "keys": {1: "a", (2, "b"): 3, None: 4},
        "tag": {"<tuple>": [1]}, "dtype": torch.bfloat16, "size": torch.Size([2, 3]),
    }  # fmt: skip
    tensors = [
        torch.randn(5, 3).bfloat16()[::2], torch.tensor(7), torch.zeros(0, 2),
        torch.tensor([1 + 2j]).conj(), torch.tensor([True, False]),
    ]  # fmt: skip
    given = {**extra, "tensors": tensors, "sparse": torch.eye(3).to_sparse()}
    save_checkpoint(tmp_path, model=model, step=1, extra=given)
    found = dict(load_checkpoint(tmp_path, model=model).extra)
    assert torch.equal(found.pop("sparse").to_dense(), torch.eye(3))
    for back, tensor in zip(found.pop("tensors"), tensors, strict=True):
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)
    assert repr(found) == repr(extra)


class Mode(enum.Enum):
    FAST = "fast"


class Point(NamedTuple):
    x: int
    y: float


def test_progress_is_the_highest_step_and_no_reason_to_fail(tmp_path, model, monkeypatch, caplog):
    progress = tmp_path / "progress"
    monkeypatch.setenv("EZPZ_PROGRESS_FILE", str(progress))
    for before, step, after in (("", 3, "3\n"), ("3\n", 2, "3\n"), ("half\xe9", 4, "4\n")):
        progress.write_text(before)
        save_checkpoint(tmp_path / "c", model=model, step=step)
        assert progress.read_text() == after
    assert sorted(os.listdir(tmp_path)) == ["c", "progress"]
    monkeypatch.setenv("EZPZ_PROGRESS_FILE", str(progress / "below"))
    assert save_checkpoint(tmp_path / "c", model=model, step=5).done
    assert "step 5 is saved, but not reported in" in caplog.text


def test_an_optimizer_without_a_step_is_saved_without_making_one(tmp_path, model):
    made = torch.optim.AdamW(model.parameters())
    save_checkpoint(tmp_path, model=model, optimizer=made, step=0)
    assert not made.state
    other = fresh()
    theirs = torch.optim.AdamW(other.parameters(), lr=0.4)
    load_checkpoint(tmp_path, model=other, optimizer=theirs)
    assert not theirs.state
    assert theirs.param_groups[0]["lr"] == 1e-3


def test_wrappers_of_one_process_and_several_optimizers(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
            self.tail = nn.Linear(3, 3)
            self.tail.weight = self.body.weight  # tied

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    def make(seen):
        net = Net()
        net.seen = seen
        body = torch.optim.SGD([*net.body.parameters()], lr=0.1, momentum=0.9)
        rest = torch.optim.Adam(
            [{"params": net.head.weight}, {"params": [net.head.bias, net.tail.bias], "lr": 0.7}]
        )
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        for one in (body, rest):
            one.step()
        return net, [body, rest]

    net, both = make(5)
    # As torch.compile's, whose import takes five seconds.
    compiled = type("OptimizedModule", (nn.Module,), {})()
    compiled._orig_mod = net
    save_checkpoint(tmp_path, model=compiled, optimizer=both, step=1)
    other, theirs = make(0)
    theirs[1].param_groups[1]["lr"] = 0
    load_checkpoint(tmp_path, model=other, optimizer=theirs)
    assert other.seen == 5
    assert theirs[1].param_groups[1]["lr"] == 0.7
    assert other.tail.weight is other.body.weight
    assert torch.equal(net.head.bias, other.head.bias)
    other = make(0)[0]
    before = other.head.weight.clone()
    one, wanted = torch.optim.Adam(other.parameters()), "a group of the optimizer has 5 parameters"
    refused(f"{wanted}.*in 3", load_checkpoint, tmp_path, model=other, optimizer=one)
    assert torch.equal(other.head.weight, before), "refused before anything is filled"
    given = {"model": net, "optimizer": torch.optim.Adam(nn.Linear(2, 2).parameters()), "step": 2}
    refused(r"of shape \(2, 2\), is none of Net's", save_checkpoint, tmp_path, **given)


def values(tensor):
    return tensor.to_dense()


class Sparse(nn.Linear):
    def __init__(self, seed):
        super().__init__(2, 2)
        self.register_buffer("graph", (torch.eye(4) * seed).to_sparse())


class Expanded(nn.Linear):
    def __init__(self, seed):
        super().__init__(2, 2)
        self.register_buffer("mask", torch.full((1,), seed).expand(3, 4))


class Renamed(nn.Module):
    """Goes by other names in its state dict than in itself."""

    def __init__(self, seed):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        nn.init.constant_(self.inner.weight, seed)
        self.inner._register_state_dict_hook(self.rename)
        self.inner._register_load_state_dict_pre_hook(self.name_back)

    def rename(self, _, state, prefix, __):
        state[prefix + "old"] = state.pop(prefix + "weight")

    def name_back(self, state, prefix, *_):
        state[prefix + "weight"] = state.pop(prefix + "old")


class Named(torch.Tensor):
    """A tensor by another name."""


class Doubled(torch.Tensor):
    """Has its values halved: they are not its bytes."""

    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)

    def __init__(self, half):
        self.half = half

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].half)
        if function is torch.ops.aten.copy_.default and isinstance(arguments[0], cls):
            arguments[0].half.copy_(arguments[1] / 2)
            return arguments[0]
        plain = [each.half * 2 if isinstance(each, cls) else each for each in arguments]
        return function(*plain, **(options or {}))


class Wrapped(nn.Linear):
    def __init__(self, seed):
        super().__init__(2, 2)
        self.doubled = nn.Parameter(Doubled(torch.full((3,), float(seed))))


class Odd(nn.Linear):
    """Tensors, alike, whose values are not their bytes in order."""

    def __init__(self, seed):
        super().__init__(2, 2)
        for number in range(5):
            value = torch.arange(12.0) + seed + 12 * number
            filters = value.view(1, 3, 2, 2).to(memory_format=torch.channels_last)
            self.register_buffer(f"filters{number}", filters)
            self.register_buffer(f"stepped{number}", value[::2])
        self.register_buffer("named", torch.full((2,), seed).as_subclass(Named))
        for number in range(2):
            conjugate = torch.view_as_complex(value.view(6, 2)).conj()
            self.register_buffer(f"conjugate{number}", conjugate)


@pytest.mark.parametrize("kind", [nn.ReLU, Sparse, Expanded, Odd, Renamed, Wrapped])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_unusual_state_comes_back(tmp_path, kind, asynchronous):
    model, other = (kind() if kind is nn.ReLU else kind(seed) for seed in (1, 2))
    given = {"optimizer": torch.optim.Adam(model.parameters(), lr=0.5)} if kind is Renamed else {}
    if given:
        model.inner(torch.ones(2)).sum().backward()
        given["optimizer"].step()
    save_checkpoint(tmp_path, model=model, step=1, asynchronous=asynchronous, **given)
    theirs = {"optimizer": torch.optim.Adam(other.parameters())} if given else {}
    assert load_checkpoint(tmp_path, model=other, **theirs).step == 1
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(values(one), values(two)) for one, two in pairs)
    if given:
        moments = [each["optimizer"].state[one.inner.weight]["exp_avg"]
                   for each, one in ((given, model), (theirs, other))]  # fmt: skip
        assert torch.equal(*moments)


def test_an_optimizer_s_state_that_would_come_back_as_another_kind_is_refused(tmp_path, model):
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model[0].bias]["moment"] = Doubled(torch.ones(7))
    given = {"model": model, "optimizer": optimizer, "step": 1}
    said = "'moment' of '0.bias' in the optimizer: it is a Doubled; expected a plain tensor"
    refused(said, save_checkpoint, tmp_path, **given)


def test_a_state_dict_that_the_model_itself_cannot_load_is_named(tmp_path):
    model = Renamed(1)
    save_checkpoint(tmp_path, model=model, step=1)
    model.inner._load_state_dict_pre_hooks.clear()
    match = r"Missing key.*inner.weight.*its own state_dict\(\)"
    refused(match, load_checkpoint, tmp_path, model=model)
    save_checkpoint(tmp_path, model=nn.Linear(2, 2), step=2)
    refused("1 tensors are not in it: graph; expected", load_checkpoint, tmp_path, model=Sparse(1))
    loaded = load_checkpoint(tmp_path, model=Sparse(1), strict=False)
    assert "left as they are: graph" in loaded.notes[0]


def test_keep_and_saving_a_step_again(tmp_path, model):
    (tmp_path / "step-00000099").mkdir()  # bears the name of one
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, model=model, step=step, keep=2)
    assert load_checkpoint(tmp_path, model=model).step == 4
    (tmp_path / "step-00000099").rmdir()
    assert entries(tmp_path) == ["step-00000003", "step-00000004"]
    with torch.no_grad():
        model[0].weight.fill_(9)
    again = save_checkpoint(tmp_path, model=model, step=4, keep=2)
    assert again.folder.endswith("step-00000004.1")
    assert entries(tmp_path) == ["step-00000003", "step-00000004.1"]
    other = fresh()
    assert load_checkpoint(tmp_path, model=other).step == 4
    assert equal(other, model)
    save_checkpoint(tmp_path, model=model, step=2, keep=1)
    assert entries(tmp_path) == ["step-00000002"]
    save_checkpoint(tmp_path, model=model, step=9, keep=None)
    assert [one.step for one in list_checkpoints(tmp_path)] == [2, 9]


def test_a_run_that_went_back_stays_there(tmp_path, model, caplog):
    for step in (100, 200, 300):
        with torch.no_grad():
            model[0].weight.fill_(step)
        save_checkpoint(tmp_path, model=model, step=step)
    assert load_checkpoint(tmp_path, model=model).step == 300
    assert "below" not in caplog.text
    load_checkpoint(tmp_path, model=model, step=100)
    save_checkpoint(tmp_path, model=model, step=150)
    assert "step 150 is saved below step 300, the last saved in" in caplog.text
    assert latest_checkpoint(tmp_path).step == verify_checkpoint(tmp_path).step == 150
    assert [one.step for one in list_checkpoints(tmp_path)] == [300, 100, 150]
    assert load_checkpoint(tmp_path, model=model).step == 150
    # Damaged, the newest gives way to the one that it stands on.
    shutil.copytree(tmp_path, tmp_path / "copy")
    damage(tmp_path / "copy/step-00000150/index.json", "flipped")
    assert load_checkpoint(tmp_path / "copy", model=model).step == 100
    shutil.rmtree(tmp_path / "copy/step-00000100")
    assert load_checkpoint(tmp_path / "copy", model=model).step == 300
    caplog.clear()
    (tmp_path / "owner.json").unlink()  # as another process finds it after this one's end
    save_checkpoint(tmp_path, model=model, step=160)
    assert [one.step for one in list_checkpoints(tmp_path)] == [100, 150, 160]
    save_checkpoint(tmp_path, model=model, step=300)
    assert [one.step for one in list_checkpoints(tmp_path)] == [150, 160, 300]
    assert "below" not in caplog.text


def test_leftovers_go_and_what_is_not_ours_stays(tmp_path, model):
    for name in (".step-00000003.tmp-0123abcd", ".step-00000002.1.gone-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "00000.bin").write_bytes(b"half")
    (tmp_path / ".owner.json.tmp-0123abcd").write_text("")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".hidden").mkdir()
    save_checkpoint(tmp_path, model=model, step=5)
    assert entries(tmp_path) == [".hidden", "notes.txt", "step-00000005"]


def test_whether_an_owner_is_alive(monkeypatch):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    mine = find_this_process()
    assert mine.is_alive
    assert dataclasses.replace(mine, pid=pid).is_alive is False
    assert dataclasses.replace(mine, started=17).is_alive is False  # it had our number before us
    assert dataclasses.replace(mine, host="elsewhere").is_alive is None
    # Where pids tell nothing.
    monkeypatch.setattr(owner, "pid_namespace", lambda: 0)
    assert mine.is_alive is None


def rewrite(folder, without=(), **changed):
    """Say in the manifest what is in the files now, as one who can write there would."""
    about = json.loads((folder / "manifest.json").read_bytes())["checkpoint"] | changed
    for name in set(os.listdir(folder)) - {"manifest.json"}:
        data = (folder / name).read_bytes()
        about["files"][name] = [len(data), f"{zlib.crc32(data):08x}"]
    for name in without:
        del (about if name in about else about["files"])[name]
    (folder / "manifest.json").write_text(summed(about))


def summed(about):
    """A manifest that says this, with its checksum."""
    crc = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    return json.dumps({"checkpoint": about, "crc32": f"{crc:08x}"})


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "truncated":
        del data[-3:]
    else:
        data[len(data) // 2] ^= 4
    path.write_bytes(data)


FILES = ["00000.bin", "index.json", "manifest.json"]


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_a_damaged_check_point_is_passed_over(tmp_path, model, optimizer, how, caplog):
    given = {"model": model, "optimizer": optimizer}
    save_checkpoint(tmp_path / "whole", step=1, **given)
    kept = fresh()
    kept.load_state_dict(model.state_dict())
    with torch.no_grad():
        model[0].weight.add_(1)
    save_checkpoint(tmp_path / "whole", step=2, **given)
    for name in FILES:
        where = tmp_path / name
        shutil.copytree(tmp_path / "whole", where)
        damage(where / "step-00000002" / name, how)
        refused(re.escape(name), verify_checkpoint, where)
        other = fresh()
        refused(re.escape(name), load_checkpoint, where, model=other, step=2)
        assert equal(other, fresh())
        caplog.clear()
        loaded = load_checkpoint(where, model=other)
        assert loaded.step == 1
        assert equal(other, kept)
        assert name in loaded.skipped[0]
        assert "step-00000002" in loaded.skipped[0]
        assert name in caplog.text
        assert "passing over a damaged checkpoint" in caplog.text
        damage(where / "step-00000001" / name, how)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(where, model=other)
        for part in (f"{where}/step-00000001: ", f"{where}/step-00000002: ", "start again"):
            assert part in str(caught.value)


def test_mixed_steps_are_seen(tmp_path, model):
    for step in (1, 2):
        save_checkpoint(tmp_path, model=model, step=step)
    shutil.rmtree(tmp_path / "step-00000002")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002")
    assert [each.step for each in list_checkpoints(tmp_path)] == [1]
    said = "step-00000002: manifest.json is of step 1"
    refused(said, load_checkpoint, tmp_path, model=model, step=2)
    refused(said, verify_checkpoint, tmp_path)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def hostile(tmp_path, model, optimizer):
    """Loads a checkpoint that was changed by one who writes its checksums, too."""
    given = {"model": model, "optimizer": optimizer}
    save_checkpoint(tmp_path / "good", step=1, extra={"a": "b" * 900}, **given)

    def load(change):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        folder = tmp_path / "bad/step-00000001"
        index = json.loads((folder / "index.json").read_bytes())
        data = bytearray((folder / "00000.bin").read_bytes())
        changed = change(index, {".".join(row[0]): row for row in index["tensors"]}, data)
        (folder / "index.json").write_text(changed or json.dumps(index))
        (folder / "00000.bin").write_bytes(data)
        rewrite(folder)
        verify_checkpoint(tmp_path / "bad")
        return load_checkpoint(tmp_path / "bad", **given)

    assert load(lambda index, rows, data: None).step == 1
    return load


def test_nothing_in_a_hostile_checkpoint_is_run(tmp_path, hostile):
    owned = tmp_path / "owned"
    stream = io.BytesIO()
    torch.save(Evil(owned), stream)
    os.mkdir(owned)
    with pytest.raises(FileExistsError):  # the weapon is loaded
        torch.load(io.BytesIO(stream.getvalue()), weights_only=False)
    owned.rmdir()
    text = json.dumps({"tensors": [], "value": {"<os.mkdir>": str(owned)}}).encode()
    tagged = struct.pack("<Q", len(text)) + text
    for key in ("common", "rank.0000000", "stage.0000"):  # extra; random streams; options
        for weapon in (stream.getvalue(), pickle.dumps(Evil(owned)), tagged):

            def change(index, rows, data, key=key, weapon=weapon):
                rows[key][1:] = ["uint8", [len(weapon)], [[[0], [len(weapon)], 0, len(data)]]]
                data += weapon

            refused(f"{key} is damaged", hostile, change)
    assert not owned.exists()


def escape(index, rows, data):
    index["files"] = ["../../secret"]


def name_a_module(index, rows, data):
    rows["model.0.weight"][1] = "os"


def point_beyond_the_end(index, rows, data):
    rows["model.0.weight"][3][0][3] = len(data)


def leave_most_out(index, rows, data):
    rows["model.0.weight"][3] = [[[0, 0], [1, 5], 0, 0]]


def have_no_name(index, rows, data):
    rows["model.0.weight"][0] = []


def be_negative(index, rows, data):
    rows["model.0.weight"][3][0][3] = -16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (escape, "index.json is damaged.*no file's name"),
        (name_a_module, "index.json is damaged.*no dtype"),
        (have_no_name, "index.json is damaged.*has no name"),
        (be_negative, "index.json is damaged.*-16 is no size"),
        (point_beyond_the_end, "00000.bin ends 140 bytes early"),
        (leave_most_out, "model.0.weight is not all in it: 5 elements of 35"),
        (lambda *_: "[]", "index.json is damaged"),
        (lambda *_: "[" * 99999, "index.json is damaged"),
        (lambda *_: '{"files": [], "tensors": 3}', "index.json is damaged"),
    ],
)
def test_a_forged_index_is_refused(hostile, change, said):
    refused(said, hostile, change)


def test_what_could_not_be_read_back_is_not_saved(tmp_path, model):
    save_checkpoint(tmp_path, model=model, step=1)
    wrong = [
        (r"extra\['list'\]\[1\]\['f'\], of type builtins", {"extra": {"list": [1, {"f": print}]}}),
        (r"data\['x'\], of type .*Linear, cannot be saved", {"data": {"x": nn.Linear(1, 1)}}),
        ("keep=0; expected at least 1", {"keep": 0}),
        ("on the meta device", {"model": nn.Linear(2, 2, device="meta")}),
    ]
    wrong += [("step=.*; expected an int from 0 to", {"step": step})
              for step in (-1, 1.0, True, 10**18, "3")]  # fmt: skip
    for said, given in wrong:
        refused(said, save_checkpoint, tmp_path, **{"model": model, "step": 2, **given})
    assert entries(tmp_path) == ["step-00000001"]


def test_deepspeed_saves_itself(tmp_path, model):
    class DeepSpeedEngine(nn.Module):
        pass

    model[0].weight.ds_id = 3  # as ZeRO-3 marks what it has taken apart
    said = r"is DeepSpeed's.*engine.save_checkpoint\(\)"
    for each in (DeepSpeedEngine(), model):
        refused(said, save_checkpoint, tmp_path, model=each, step=1)
    del model[0].weight.ds_id
    save_checkpoint(tmp_path, model=model, step=1)
    refused(said, load_checkpoint, tmp_path, model=DeepSpeedEngine())


def test_another_model_is_refused(tmp_path, model, optimizer):
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, step=1)
    wider = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    for said, other in (
        (r"model.0.weight has shape \(7, 5\).*\(8, 5\) here", wider),
        ("2 tensors are not in it: model.3.weight", nn.Sequential(*fresh(), nn.Linear(2, 2))),
        ("2 tensors of it are none of the model's: model.2.", fresh()[:2]),
        ("would be cast: model.0.weight from torch.float32", fresh().double()),
    ):
        refused(said, load_checkpoint, tmp_path, model=other)
    longer = nn.Sequential(*fresh().double(), nn.Linear(2, 2))
    loaded = load_checkpoint(tmp_path, model=longer, strict=False)
    assert "2 tensors were left as they are: model.3.weight" in loaded.notes[0]
    assert "were cast" in loaded.notes[1]
    assert torch.equal(longer[0].weight.float(), model[0].weight)
    given = {"model": fresh(), "data": {}, "scheduler": optimizer}
    refused("but no data, scheduler; leave them out", load_checkpoint, tmp_path, **given)
    loaded = load_checkpoint(tmp_path, model=fresh()[:2], data={}, strict=False)
    assert loaded.notes == (
        "no data in it: left as they are", "2 tensors were left out: model.2.bias, model.2.weight",
    )  # fmt: skip


def test_replicas_share_the_writing():
    """Rank 0 is told once what many hold; the rest is dealt out by size."""
    tensors = {("model", f"layer{number}"): torch.zeros(64, 4) for number in range(12)}
    items = list_items({name: find_pieces(each) for name, each in tensors.items()})
    mine = list_items({("model", "more"): find_pieces(torch.zeros(128, 4))})
    held = [(items, [1, 2, 3, 4, 5]), ([*items[:6], *mine], [0])]
    packed = [pack_items(each) for each, _ in held]
    holdings = [
        Holding(data, each, ranks, frozenset({(0, 0)}))
        for data, (each, ranks) in zip(packed, held, strict=True)
    ]
    plan = plan_writers(holdings)
    written = {}
    for data, (each, ranks) in zip(packed, held, strict=True):
        for rank in ranks:
            written[rank] = plan.find_own(rank, data, each)
    keys = [item.key for each in written.values() for item in each]
    assert sorted(keys) == sorted([*tensors, ("model", "more")])
    sizes = [sum(item.nbytes for item in each) for each in written.values()]
    assert max(sizes) <= 3 * 64 * 4 * 4
    assert plan.shared == []


def test_asynchronous(tmp_path, model):
    """What is saved is the state at the call, whatever comes after."""
    kept = fresh()
    kept.load_state_dict(model.state_dict())
    saving = save_checkpoint(tmp_path, model=model, step=1, asynchronous=True)
    with torch.no_grad():
        model[0].weight.zero_()
    assert saving.wait().endswith("step-00000001")
    assert "done" in repr(saving)
    going = Saving(3, "there")
    refused("step 3 is not saved after 0.01 s; expected there", going.wait, 0.01)
    assert "being written" in repr(going)
    other = fresh()
    load_checkpoint(tmp_path, model=other)
    assert equal(other, kept)

    blocked = tmp_path / "blocked"
    blocked.mkdir()
    saving = save_checkpoint(blocked, model=model, step=1, asynchronous=True)
    finish_saving()
    shutil.rmtree(blocked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataWriter, "finish", fail_to_write)
        failing = save_checkpoint(blocked, model=model, step=2, asynchronous=True)
        said = "No such file.*blocked/.*00000.bin"
        refused(said, save_checkpoint, tmp_path, model=model, step=2)
        refused(said, failing.wait)
    assert os.listdir(blocked) == ["owner.json"]
    assert save_checkpoint(tmp_path, model=model, step=2).done


def fail_to_write(writer):
    raise FileNotFoundError(errno.ENOENT, "No such file", str(writer._path))


def test_a_url_is_no_folder(model):
    said = "s3://bucket/c is a URL; expected a folder of a mounted file system"
    refused(said, load_checkpoint, "s3://bucket/c", model=model)
    refused(said, save_checkpoint, "s3://bucket/c", model=model, step=1)
    refused(said, verify_checkpoint, "s3://bucket/c")


def test_something_is_in_the_way(tmp_path, model, monkeypatch):
    (tmp_path / "file").write_text("")
    given, said = {"model": model, "step": 1}, "step 1 cannot be saved to .*"
    refused(f"{said}(NotADir|FileExists)", save_checkpoint, tmp_path / "file", **given)
    refused(f"{said}NotADirectoryError", save_checkpoint, tmp_path / "file/below", **given)

    def and_another_job(root, *_):
        (root / "step-00000001/its").mkdir(parents=True)

    with monkeypatch.context() as patch:
        patch.setattr(files, "find_new_name", lambda root, step: files.Name(step))
        patch.setattr(files, "remove_leftovers", and_another_job)
        said = "step-00000001 has appeared.*one job at a time"
        refused(said, save_checkpoint, tmp_path / "two", **given)
    assert entries(tmp_path / "two") == ["step-00000001"]

    def and_another_saves(root, *_):
        away = dataclasses.asdict(dataclasses.replace(find_this_process(), host="elsewhere"))
        (root / "owner.json").write_text(json.dumps({"process": away, "job": "PBS_JOBID=7"}))

    match = rf"saves in .*three: PBS_JOBID=7, process {os.getpid()} on elsewhere, which may run"
    with monkeypatch.context() as patch:
        patch.setattr(files, "remove_leftovers", and_another_saves)
        refused(match, save_checkpoint, tmp_path / "three", **given)
    assert os.listdir(tmp_path / "three") == ["owner.json"]
    (tmp_path / "three/owner.json").write_text("[]")  # tells nothing
    save_checkpoint(tmp_path / "three", **given)
    said = "cannot be listed: NotADirectoryError"
    refused(said, load_checkpoint, tmp_path / "file", model=model)


def test_shards_that_nothing_can_be_told_of(tmp_path):
    import ezpz_tp

    made = ezpz_tp.ColumnParallelLinear(4, 6)
    ezpz_tp.set_shard(made.weight, ezpz_tp.Shard((12, 4), 0), degree=2)
    said = r"weight: it has shape \(6, 4\); expected \(12, 4\)"
    refused(said, save_checkpoint, tmp_path, model=made, step=1)
    made.weight.allreduce = False
    refused("weight is an expert's", save_checkpoint, tmp_path, model=made, step=1)


def test_manifests_that_do_not_fit_their_folder(tmp_path, model):
    folder = Path(save_checkpoint(tmp_path, model=model, step=1).folder)
    path, index = folder / "manifest.json", folder / "index.json"
    whole = path.read_text()
    for number in (2, 9):
        rewrite(folder, format=number)
        said = f"has format {number}; this ezpz_dist reads 3"
        refused(said, load_checkpoint, tmp_path, model=model)
    for name, said in (("00000.bin", "does not list 00000.bin"), ("index.json", "has no index")):
        path.write_text(whole)
        rewrite(folder, without=[name])
        refused(f"the manifest {said}", load_checkpoint, tmp_path, model=model)
    index.write_text(index.read_text().replace('"common"', '"x"'))
    path.write_text(whole)
    rewrite(folder)
    said = "there is no common in it; save_checkpoint writes"
    refused(said, load_checkpoint, tmp_path, model=model)
    path.write_text(whole.replace('"step": 1', '"step": 7'))
    refused(r"manifest.json is damaged: crc32 \w+; expected \w+", verify_checkpoint, tmp_path)
    wrong = map(summed, ([], 5, {"format": 3, "step": float("inf"), "files": {}}))
    for text in ('{"checkpoint": {"format": 3, "files": []}, "crc32": "0"}', "nothing", *wrong):
        path.write_text(text)
        refused("manifest.json is damaged", verify_checkpoint, tmp_path)
        refused("manifest.json is damaged", load_checkpoint, tmp_path, model=model)
    path.unlink()
    path.mkdir()
    refused("manifest.json cannot be read", verify_checkpoint, tmp_path)


def test_folders_that_hosts_do_not_share(tmp_path, monkeypatch, model):
    """Rank 0 sees another size than a rank wrote: here because the file is cut meanwhile."""
    monkeypatch.setattr(save, "_VISIBLE_WITHIN", 0.1)
    monkeypatch.setattr(files, "find_size", lambda *_: 3)
    match = r"rank 0 on .* sees 3 bytes of 00000.bin, rank 0 on .*; expected a folder that all"
    refused(match, save_checkpoint, tmp_path, model=model, step=1)
    assert entries(tmp_path) == []


def test_an_owner_that_cannot_be_read_is_not_passed_over(tmp_path):
    owner = tmp_path / "owner.json"
    owner.symlink_to(owner)  # a loop: also root cannot read it
    with pytest.raises(CheckpointError, match=r"owner\.json"):
        save_checkpoint(tmp_path, model=nn.Linear(2, 2), step=1)
    assert os.listdir(tmp_path) == ["owner.json"]
