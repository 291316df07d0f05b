"""Samples by data-parallel rank, one reader for a model's ranks, and a position that lasts."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import chain

import pytest
import torch

from ezpz_dist import DataError, DataLoader, DataParallelSampler, data_share, share_of


def samplers(length, count, **more):
    return [DataParallelSampler(length, share=(which, count), **more) for which in range(count)]


def run(each, steps=None):
    """What the ranks get together, in rounds; at most so many of these."""
    passes = [iter(sampler) for sampler in each]
    rounds = []
    while steps is None or len(rounds) < steps:
        taken = [next(one, None) for one in passes]
        assert (None in taken) == (set(taken) == {None}), "equally many on every rank"
        if taken[0] is None:
            break
        rounds.append(taken)
    return [index for taken in rounds for index in taken]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [1, 12, 13])
def test_every_sample_comes_once_an_epoch(length, count):
    each = samplers(length, count)
    epochs = [run(each) for _ in range(3)]
    for got in epochs:
        padding = -length % count
        assert len(got) == length + padding == count * len(each[0])
        assert sorted(got[:length]) == list(range(length))
        assert got[length:] == (got[:length] * count)[:padding], "the first ones once more"
    assert length == 1 or len({tuple(got) for got in epochs}) == 3, "another order each"
    assert [sampler.epoch for sampler in each] == [3] * count
    if length >= count:
        got = run(samplers(length, count, drop_last=True))
        assert len(got) == length - length % count == len(set(got))
    assert run(samplers(length, count, shuffle=False))[:length] == list(range(length))


def test_orders_are_of_seed_and_epoch_and_nobody_elses():
    before = torch.get_rng_state()
    first, again, other = (DataParallelSampler(50, seed=seed) for seed in (1, 1, 2))
    assert run([first]) == run([again]) != run([other])
    large = DataParallelSampler(50, seed=1 + (1 << 12))
    assert run([large]) != run([DataParallelSampler(50, seed=1)])
    second = run([first])
    again.set_epoch(5), again.set_epoch(1)
    assert run([again]) == second
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("then", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [0, 1, 5, 6])
def test_it_goes_on_in_mid_epoch_with_any_number_of_ranks(steps, then):
    length = 24
    whole = run(samplers(length, 1))
    each = samplers(length, 4)
    head = run(each, steps)
    states = [sampler.state_dict() for sampler in each]
    assert all(state == states[0] for state in states), "the same on every rank"
    assert head == whole[: 4 * steps]
    rest = samplers(length, then)
    for sampler in rest:
        sampler.load_state_dict(states[0])
        sampler.set_epoch(sampler.epoch)  # as loops do; keeps the position
    tail = run(rest)
    expected = whole[4 * steps :]
    if steps == 6:  # all of it was handed out: what follows is the next epoch
        assert tail[:length] != whole
        assert sorted(tail[:length]) == list(range(length))
    else:
        assert tail[: len(expected)] == expected
        assert len(tail) - len(expected) == -len(expected) % then
    assert rest[0].epoch == (2 if steps == 6 else 1)
    broken_off = next(iter(rest[0]))
    assert next(iter(rest[0])) == broken_off, "a pass that was broken off begins anew"


def test_chunks_do_not_show():
    each = samplers(100_000, 3)
    got = run(each)
    assert sorted(got[:100_000]) == list(range(100_000))
    each[0].load_state_dict({**each[0].state_dict(), "epoch": 0, "position": 60_000})
    assert list(each[0]) == got[60_000::3]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_counts_what_the_training_had(workers):
    def loader():
        return DataLoader(range(19), 4, shuffle=True, seed=3, num_workers=workers)

    def batches(loader):
        return [batch.tolist() for batch in loader]

    random = torch.get_rng_state()
    one = loader()
    assert len(one) == 5
    epochs = [batches(one), batches(one)]
    assert one.epoch == 2
    assert epochs[0] != epochs[1]
    two = loader()
    assert two.state_dict()["position"] == 0
    for number, _ in enumerate(two, 1):
        if number == 2:
            break
    state = two.state_dict()
    assert (state["epoch"], state["position"]) == (0, 8), "not what workers fetched ahead"
    three = loader()
    three.load_state_dict(state)
    three.set_epoch(three.epoch)
    assert three.state_dict() == state
    assert batches(three) == epochs[0][2:]
    assert batches(three) == epochs[1]
    assert batches(two) == epochs[0], "a pass that was broken off begins anew"
    last = iter(two)
    for _ in range(5):
        next(last)
    assert two.state_dict()["epoch"] == two.epoch == 2, "after the last batch it is the next epoch"
    assert torch.equal(torch.get_rng_state(), random), "a resumed run has the same random numbers"


def test_the_loader_leaves_out_what_fills_no_batch():
    loader = DataLoader(range(11), 4, drop_last=True)
    batches = iter(loader)
    assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)
    assert next(batches, None) is None
    singles = DataLoader(range(3), None)
    assert [int(next(iter(singles))), singles.state_dict()["position"]] == [0, 1]


class Pids(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return os.getpid()


def test_workers_outlive_the_signals_that_end_a_job():
    loader = DataLoader(Pids(), num_workers=1, prefetch_factor=1, worker_init_fn=print)
    batches = iter(loader)
    worker = int(next(batches))
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(worker, number)
    time.sleep(0.1)
    assert sum(int(pid) == worker for pid in batches) == 49


READING = """
import ezpz_dist, torch
def read():
    loader = ezpz_dist.DataLoader(range(8), num_workers=1, {options})
    batches = iter(loader)
    next(batches)
    return loader, batches
def read_in_child(rank):
    global here
    here = read()
if __name__ == "__main__":
    {call}
    print("read")
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["here = read()", "torch.multiprocessing.spawn(read_in_child)"])
@pytest.mark.parametrize("options", ["persistent_workers=True", "multiprocessing_context='spawn'"])
def test_a_process_ends_while_its_loader_has_workers(user_env, tmp_path, options, call):
    script = tmp_path / "train.py"
    script.write_text(READING.format(options=options, call=call))
    # Far below the ten minutes for which workers outlive SIGTERM.
    done = subprocess.run(
        [sys.executable, script], env=user_env, timeout=300, check=True, capture_output=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (b"read\n", b"")


DRAWS = """
import os, random, numpy, torch

class Draws(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return random.random(), numpy.random.random(), float(torch.rand(()))

def draw(loader):
    return [[list(row) for row in batch] for batch in loader]
"""
# What draws is a module of its own, because workers that are spawned import it.
DRAW = """
import json
sys.path.insert(0, os.environ["DRAWS"])
from draws import Draws, draw
setup_torch(seed=1, {degrees})
make = lambda: DataLoader(Draws(), seed=1, collate_fn=list, {options})
loader = make()
passes = [draw(loader), draw(loader)]
position = data_share()[1]  # one round of the first epoch
resumed = make()
resumed.load_state_dict({{**resumed.state_dict(), "epoch": 0, "position": position}})
passes.append(draw(resumed))
print(json.dumps([data_share()[0], passes]))
del loader, resumed
cleanup()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "degrees", "options"),
    [
        (2, "", "num_workers=0"),
        (2, "", "num_workers=1, multiprocessing_context='fork'"),
        (2, "", "num_workers=2, multiprocessing_context='fork', persistent_workers=True"),
        (2, "", "num_workers=1, multiprocessing_context='spawn', persistent_workers=True"),
        (4, "tensor_parallel_size=2", "num_workers=0"),
        (4, "tensor_parallel_size=2", "num_workers=2, multiprocessing_context='fork'"),
        (
            4, "tensor_parallel_size=2",
            "num_workers=1, multiprocessing_context='fork', persistent_workers=True",
        ),
        (4, "context_parallel_size=2", "num_workers=1, multiprocessing_context='fork'"),
    ],
)  # fmt: skip
def test_random_numbers_differ_by_data_rank_epoch_and_position(
    ranks, tmp_path, n, degrees, options
):
    (tmp_path / "draws.py").write_text(DRAWS)
    script = DRAW.format(degrees=degrees, options=options)
    printed = ranks(n, script, env={"DRAWS": str(tmp_path)})
    by_share = {}
    for text in printed:
        share, passes = json.loads(text.splitlines()[-1])
        assert by_share.setdefault(share, passes) == passes, "the same on the ranks of a model"
    assert sorted(by_share) == [0, 1]
    samples = [row for passes in by_share.values() for one in passes for (row,) in one]
    assert len(samples) == 2 * (4 + 4 + 3)
    streams = dict(zip(("random", "numpy", "torch"), zip(*samples, strict=True), strict=True))
    for stream, numbers in streams.items():
        assert len(set(numbers)) == len(samples), f"{stream}: some came twice"


class Seeds(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.utils.data.get_worker_info().seed, torch.initial_seed()


def seed_worker(worker):
    torch.manual_seed(100 + worker)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_users_generator_and_worker_init_fn_seed_the_workers(persistent):
    more = {"num_workers": 1, "persistent_workers": persistent, "multiprocessing_context": "fork"}
    own = torch.Generator().manual_seed(7)
    same = torch.Generator().manual_seed(7)
    loader = DataLoader(Seeds(), None, generator=own, worker_init_fn=seed_worker, **more)
    expected = torch.empty((), dtype=torch.int64).random_(generator=same).item()
    assert list(loader) == [[expected, 100]] * 4
    del loader


def test_items_are_dealt_out_by_size():
    items, sizes = list("abcdefg"), [1, 9, 2, 8, 3, 7, 6]
    parts = [share_of(items, sizes=sizes, share=(which, 3)) for which in range(3)]
    assert sorted(item for part in parts for item in part) == items
    loads = [sum(sizes[items.index(item)] for item in part) for part in parts]
    assert max(loads) <= 4 / 3 * 36 / 3
    alone = [share_of(range(5), sizes=[0] * 5, share=(which, 5)) for which in range(5)]
    assert alone == [[0], [1], [2], [3], [4]]
    assert data_share() == (0, 1)
    assert share_of(items) == items


SAMPLER = DataParallelSampler(10, seed=1)
OTHER = r"a sampler's state of .*the order of the samples"


def loads(**changed):
    return lambda: SAMPLER.load_state_dict({**SAMPLER.state_dict(), **changed})


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: share_of([1, 2], share=(0, 3)), DataError,
         "2 items for 3 data-parallel ranks; expected at least one"),
        (lambda: share_of([1, 2], sizes=[1]), ValueError, "1 sizes; expected one for each of 2"),
        (lambda: share_of([1, 2], share=(3, 3)), ValueError,
         r"share \(3, 3\); expected \(which, of how many\)"),
        (lambda: DataParallelSampler(3, seed=-1), ValueError, "seed -1; expected 0 to"),
        (lambda: DataParallelSampler(3).set_epoch(-1), ValueError, "epoch -1; expected 0 to"),
        (lambda: DataParallelSampler([]), DataError,
         "0 samples for 1 data-parallel ranks.*expected at least 1"),
        (lambda: DataParallelSampler(2, drop_last=True, share=(0, 3)), DataError,
         "2 samples for 3 .*drop_last=True; expected at least 3"),
        (loads(seed=2), DataError, OTHER),
        (loads(length=11), DataError, OTHER),
        (loads(shuffle=False), DataError, OTHER),
        (loads(position=11), DataError, OTHER),
        (loads(epoch=-1), DataError, "a sampler's epoch -1; expected 0 to"),
        (lambda: SAMPLER.load_state_dict({"epoch": 1}), DataError,
         "a sampler's state without 'length'; expected what"),
        (lambda: DataLoader([1], sampler=SAMPLER), TypeError,
         "sampler= for ezpz_dist.DataLoader; it makes its own"),
        (lambda: DataLoader(torch.utils.data.ChainDataset([])), DataError,
         "ChainDataset has no indices to deal out"),
    ],
)  # fmt: skip
def test_what_they_do_not_take(call, kind, said):
    with pytest.raises(kind, match=said):
        call()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # its import reads all of torch
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_takes_the_sampler(workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        sampler = DataParallelSampler(40, share=(1, 2))
        return torchdata.StatefulDataLoader(range(40), 4, sampler=sampler, num_workers=workers)

    one = loader()
    whole = [batch.tolist() for batch in one]
    after = [batch.tolist() for batch in one]
    two = loader()
    for number, _ in enumerate(two, 1):
        if number == 2:
            state = two.state_dict()
            break
    three = loader()
    three.load_state_dict(state)
    assert [batch.tolist() for batch in three] == whole[2:]
    assert [batch.tolist() for batch in three] == after


# One reader for the ranks of a model.

SETUP = """
import ezpz_tp, json
setup_torch({degrees})

class Numbers(torch.utils.data.Dataset):
    read = 0
    def __len__(self):
        return 20
    def __getitem__(self, index):
        Numbers.read += 1
        x = torch.full((4,), index)
        return {{"x": x, "name": f"sample {{index}}", "pair": [x, x]}}

state = ezpz_tp.get_state() if ezpz_tp.tensor_parallel_is_initialized() else None
share = state.index("data") if state else data_share()[0]
loader = DataLoader(Numbers(), batch_size=2, shuffle=True, seed=3, one_reader=True, {options})
"""
# Broken off after two batches, on every rank, and gone on with.
GO_THROUGH = """
seen = []
for number, batch in enumerate(loader, 1):
    seen.append(batch["x"][:, 0].tolist())
    if number == 2:
        break
middle = loader.state_dict()
loader.load_state_dict(middle)
seen += [batch["x"][:, 0].tolist() for batch in loader]
print(json.dumps([share, seen, Numbers.read, middle, loader.state_dict(), loader.is_reader,
    data_share(), share_of("abcde"), list(DataParallelSampler(4))]))
cleanup()
"""


def go_through(ranks, n, degrees="", options="", script=GO_THROUGH):
    printed = ranks(n, SETUP.format(degrees=degrees, options=options) + script)
    return [json.loads(text.splitlines()[-1]) for text in printed]


def alone(share, of):
    """What torch gives to the data-parallel rank: every of-th sample of one order."""
    order = [int(batch) for batch in DataLoader(range(20), 1, shuffle=True, seed=3)]
    return order[share::of]


@pytest.mark.parametrize(
    ("n", "degrees", "data"),
    [
        (1, "", 1),
        (2, "", 2),
        (2, "tensor_parallel_size=2", 1),
        (4, "tensor_parallel_size=2, context_parallel_size=2", 1),
        (4, "tensor_parallel_size=2", 2),
        (4, "pipeline_parallel_size=2, context_parallel_size=2", 1),
    ],
)
def test_the_ranks_of_a_model_have_the_samples_of_one_reader(ranks, n, degrees, data):
    done = go_through(ranks, n, degrees)
    assert sum(each[5] for each in done) == data
    for share, seen, read, middle, state, reader, share_too, items, samples in done:
        assert share_too == [share, data]
        assert items == list("abcde"[share::data])
        assert samples == list(DataParallelSampler(4, share=(share, data)))
        assert list(chain(*seen)) == alone(share, data)
        assert read == (20 // data if reader else 0)
        assert state == dict(epoch=1, position=0, length=20, shuffle=True, seed=3)  # noqa: C408
        assert middle == {**state, "epoch": 0, "position": 4 * data}
    all_read = chain(*(chain(*seen) for _, seen, *_, reader, _, _, _ in done if reader))
    assert sorted(all_read) == list(range(20))


def test_workers_are_the_readers_alone_and_tensors_come_to_the_device(ranks):
    script = """
    import multiprocessing
    batches = iter(loader)
    first = next(batches)
    children = len(multiprocessing.active_children())
    del batches
    assert {each.device.type for each in (first["x"], *first["pair"])} == {"meta"}
    print(json.dumps([first["name"], children]))
    cleanup()
    """
    options = "num_workers=1, multiprocessing_context='fork', device='meta'"
    done = go_through(ranks, 2, "tensor_parallel_size=2", options, textwrap.dedent(script))
    (names, workers), (names_too, no_workers) = done
    assert names == names_too
    assert len(names) == 2
    assert (workers, no_workers) == (1, 0)


def test_a_device_that_does_not_exist_is_refused_at_once():
    with pytest.raises(RuntimeError, match="cude"):
        DataLoader([1, 2], device="cude")


def test_a_failing_reader_and_workers_that_do_not_start_are_every_ranks_error(ranks):
    script = """
    setup_torch(tensor_parallel_size=2)

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            raise OSError("the disk is gone")

    workers = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    for loader in (
        DataLoader(Broken(), one_reader=True),
        DataLoader([1, 2], collate_fn=lambda rows: rows, one_reader=True, **workers),
    ):
        print(type(error := raises(Exception, "", list, loader)).__name__, error, end="|")
    cleanup()
    """
    reader, other = (out.split("|") for out in ranks(2, script))
    failed = "DataError the reader of this rank's batches failed, rank 0: "
    assert (reader[0], other[0]) == (
        "OSError the disk is gone", f"{failed}OSError: the disk is gone",
    )  # fmt: skip
    assert not reader[1].startswith("DataError")
    assert other[1].startswith(failed)
    assert "lambda" in other[1]
