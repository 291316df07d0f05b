"""Files of torch.save and safetensors: one rank reads, all have it, and no code of theirs runs."""

import os
import pickle

import pytest
import torch

from ezpz_dist import load_into, load_on_one_rank


def make_state():
    shared = torch.arange(6.0).view(2, 3)
    return {
        "weight": torch.randn(5, 4).t(),
        "shared": [shared, shared],
        "param": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "mask": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "sparse": torch.eye(3).to_sparse(),
        "model": torch.nn.BatchNorm1d(2).state_dict(),
        "step": 7,
        "name": "x",
    }


@pytest.mark.parametrize("n", [1, 3])
def test_one_rank_reads_and_all_have_it(ranks, tmp_path, n):
    torch.save(make_state(), tmp_path / "new.pt")
    torch.save(make_state(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"a": torch.ones(2)}, tmp_path / "again.pt")
    script = """
        import pathlib
        rank, n = setup_torch(timeout=30), int(os.environ.get("WORLD_SIZE", 1))
        folder = pathlib.Path(os.environ["FOLDER"])
        for name in ("new.pt", "old.pt"):
            expected = torch.load(folder / name, weights_only=True)
            opened = []
            true_load = torch.load
            torch.load = lambda *words, **more: opened.append(rank) or true_load(*words, **more)
            state = load_on_one_rank(folder / name, root=n - 1)
            torch.load = true_load
            assert opened == ([rank] if rank == n - 1 else []), "one reader"
            assert list(state) == list(expected)
            for key in ("weight", "param", "scalar", "empty", "mask", "complex"):
                mine, wanted = state[key], expected[key]
                assert torch.equal(mine, wanted) and mine.dtype == wanted.dtype, key
                assert type(mine) is type(wanted) and not mine.requires_grad
            assert torch.equal(state["sparse"].to_dense(), torch.eye(3))
            assert state["shared"][0] is state["shared"][1], "what was one tensor is one"
            assert state["model"]._metadata == expected["model"]._metadata, "its versions"
            assert (state["step"], state["name"]) == (7, "x")
        if n > 1:
            # The reader's tensors do not lie in the file: it may be written again.
            kept = load_on_one_rank(folder / "again.pt")
            barrier()
            if rank == 0:
                at = (folder / "again.pt").read_bytes()
                with open(folder / "again.pt", "r+b") as file:
                    file.write(bytes(len(at)))
            barrier()
            assert kept["a"].tolist() == [1, 1]
        meta = load_on_one_rank(folder / "new.pt", map_location="meta")
        assert meta["weight"].is_meta
        if n == 3:
            group = dist.new_group([1, 2], use_local_synchronization=True) if rank else None
            if rank:
                assert load_on_one_rank(folder / "new.pt", root=1, group=group)["step"] == 7
            barrier()
            said = "root 3; expected a rank from 0 to 2"
            raises(ValueError, said, load_on_one_rank, folder / "new.pt", root=3)
        """
    ranks(n, script, env={"FOLDER": str(tmp_path)})


class Hostile:
    def __reduce__(self):
        return os.mkdir, (os.environ["TRAP"],)


@pytest.mark.parametrize("n", [1, 2])
def test_what_cannot_be_read_is_every_ranks_error_and_not_run(ranks, tmp_path, monkeypatch, n):
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    torch.save({"a": torch.ones(1), "b": Hostile()}, tmp_path / "hostile.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Hostile()))
    torch.save({"a": torch.ones(1000)}, tmp_path / "cut.pt")
    whole = (tmp_path / "cut.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    script = """
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        rank, folder = setup_torch(timeout=30), os.environ["FOLDER"]
        model = torch.nn.Linear(1, 1)
        for name in ("hostile.pt", "raw.pt", "cut.pt", "no.pt", "cut.safetensors"):
            for load in (load_on_one_rank, lambda path: load_into(model, path)):
                print(name, raises(CheckpointError, "", load, f"{folder}/{name}"))
        assert not os.path.exists(f"{folder}/sprung")
        """
    done = ranks(n, script, env={"FOLDER": str(tmp_path)})
    assert len(set(done)) == 1, "the same words on every rank"
    for words in (
        "hostile.pt: it asks for posix.mkdir, and what it holds beyond tensors and plain values",
        "values could run code; nothing of it was run",
        "raw.pt: Unsupported operand 149, and what it holds",
        "cut.pt: RuntimeError: PytorchStreamReader failed",
        "no.pt: FileNotFoundError: [Errno 2] No such file",
        "cannot load " + str(tmp_path / "cut.safetensors"),
        "rank 0 on ",
    ):
        assert words in done[0], done[0]


@pytest.mark.parametrize("n", [1, 4])
def test_a_model_is_filled_whatever_wraps_it(ranks, tmp_path, n):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3)]
    state = torch.nn.Sequential(*layers).state_dict() | {"mask": torch.full((3, 4), 2.0)}
    torch.save({"model": state, "step": 3}, tmp_path / "model.pt")
    torch.save({**state, "more": torch.ones(1)}, tmp_path / "extra.pt")
    script = """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
        rank, n = setup_torch(timeout=30), int(os.environ.get("WORLD_SIZE", 1))
        path = os.environ["FOLDER"] + "/model.pt"
        truth = torch.load(path, weights_only=True)["model"]

        def build(mask=None):
            torch.manual_seed(rank)
            model = torch.nn.Sequential(
                torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
            model.register_buffer("mask", torch.ones(1).expand(3, 4) if mask is None else mask)
            return model

        def check(model):
            for name, value in model.state_dict().items():
                full = value.full_tensor() if isinstance(value, DTensor) else value
                assert torch.equal(full, truth[name]), name

        def loads(wrapped, bare, **more):
            load_into(wrapped, path, key="model", **more)
            check(bare)

        bare = build()
        loads(bare, bare)
        # As torch.compile's, whose import takes five seconds.
        compiled = type("OptimizedModule", (torch.nn.Module,), {})()
        compiled._orig_mod = build()
        loads(compiled, compiled._orig_mod)
        if n > 1:
            wrapped = torch.nn.parallel.DistributedDataParallel(build(torch.ones(3, 4)))
            loads(wrapped, wrapped.module, root=1)
            sharded = build()
            for layer in sharded:
                fully_shard(layer, mesh=init_device_mesh("cpu", (n,)))
            loads(sharded, sharded)
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            both = build()
            parallelize_module(both, mesh["tp"], {"0": ColwiseParallel()})
            fully_shard(both, mesh=mesh["dp"])
            loads(both, both)

        def refused(words, model, **more):
            file = more.pop("file", "model.pt")
            path = os.environ["FOLDER"] + "/" + file
            raises(CheckpointError, words, load_into, model, path, **more)

        odd = rank == n - 1  # the others must not wait for it
        short = torch.nn.Sequential(torch.nn.Linear(5, 7))
        wide = torch.nn.Sequential(torch.nn.Linear(5, 8))
        refused(f"not fit on rank {n - 1}: it lacks 0 of the model's tensors [] and has 8 others",
            short if odd else build(), key="model")
        refused(f"on rank {n - 1}: 0.weight is [7, 5]; expected [8, 5]",
            wide if odd else build(), key="model", strict=False)
        refused("it has no 'weights'; expected one of ['model', 'step']", build(), key="weights")
        refused("it holds a int; expected a state dict", build(), key="step")
        refused("it lacks 10 of the model's tensors ['mask', '0.weight', ", build())
        with torch.device("meta"):
            meta = build()
        refused("is on the meta device; call model.to_empty() first", meta, key="model")
        refused("has 1 others ['more']", build(), file="extra.pt")
        loose = build()
        load_into(loose, os.environ["FOLDER"] + "/extra.pt", strict=False)
        check(loose)
        """
    ranks(n, script, env={"FOLDER": str(tmp_path)})


def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"weight": torch.randn(2, 3), "bias": torch.ones(2)}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    found = load_on_one_rank(tmp_path / "model.safetensors")
    assert found.keys() == state.keys()
    assert torch.equal(found["weight"], state["weight"])
    model = torch.nn.Linear(3, 2)
    load_into(model, tmp_path / "model.safetensors")
    assert torch.equal(model.weight, state["weight"])
