"""One reader for the ranks of a model, on real ranks; the position is everybody's."""

import json
import textwrap
from itertools import chain

import pytest
import torch

from ezpz.data import DataLoader
from ezpz_dist import DataError

SETUP = """
import json
from ezpz.data import DataLoader
ezpz_dist.setup_torch({degrees})

class Numbers(torch.utils.data.Dataset):
    read = 0
    def __len__(self):
        return 20
    def __getitem__(self, index):
        Numbers.read += 1
        return {{"x": torch.full((4,), index), "name": f"sample {{index}}"}}

state = ezpz_tp.get_state() if ezpz_tp.tensor_parallel_is_initialized() else None
share = state.index("data") if state else ezpz_dist.data_share()[0]
loader = DataLoader(Numbers(), batch_size=2, shuffle=True, seed=3, {options})
"""
GO_THROUGH = """
seen = [batch["x"][:, 0].tolist() for batch in loader]
print(json.dumps([share, seen, Numbers.read, loader.state_dict(), loader.is_reader]))
ezpz_dist.cleanup()
"""


def go_through(ranks, n, degrees="", options="", script=GO_THROUGH):
    printed = ranks(n, SETUP.format(degrees=degrees, options=options) + script)
    return [json.loads(text.splitlines()[-1]) for text in printed]


def alone(share, of):
    """What torch gives to the data-parallel rank: every of-th sample of one order."""
    order = [batch["x"] for batch in DataLoader(Xs(), 1, shuffle=True, seed=3)]
    return [int(one) for one in order][share::of]


class Xs(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"x": index}


@pytest.mark.parametrize(
    ("n", "degrees", "data"),
    [
        (2, "", 2),
        (2, "tensor_parallel_size=2", 1),
        (4, "tensor_parallel_size=2, context_parallel_size=2", 1),
        (4, "tensor_parallel_size=2", 2),
        (4, "pipeline_parallel_size=2, context_parallel_size=2", 1),
    ],
)
def test_the_ranks_of_a_model_have_the_samples_of_one_reader(ranks, n, degrees, data):
    done = go_through(ranks, n, degrees)
    assert sum(reader for *_, reader in done) == data
    for share, seen, read, state, reader in done:
        assert list(chain(*seen)) == alone(share, data)
        assert read == (20 // data if reader else 0)
        assert state == {
            "epoch": 1, "position": 0, "length": 20, "shuffle": True, "seed": 3
        }  # fmt: skip
    all_read = chain(*(chain(*seen) for _, seen, _, _, reader in done if reader))
    assert sorted(all_read) == list(range(20))


def test_workers_are_the_readers_alone_and_tensors_come_to_the_device(ranks):
    script = """
    import multiprocessing
    batches = iter(loader)
    first = next(batches)
    children = len(multiprocessing.active_children())
    del batches
    print(json.dumps([first["x"].device.type, first["name"], children]))
    ezpz_dist.cleanup()
    """
    options = "num_workers=1, multiprocessing_context='fork', device='meta'"
    done = go_through(ranks, 2, "tensor_parallel_size=2", options, textwrap.dedent(script))
    (device, names, workers), (device_too, names_too, no_workers) = done
    assert device == device_too == "meta"
    assert names == names_too
    assert len(names) == 2
    assert (workers, no_workers) == (1, 0)


def test_a_run_goes_on_with_another_data_parallel_degree(ranks):
    """Two data-parallel ranks of two tensor ranks stop in mid-epoch; one goes on."""
    stop = """
    seen = []
    for number, batch in enumerate(loader, 1):
        seen += batch["x"][:, 0].tolist()
        if number == 2:
            break
    print(json.dumps([share, seen, loader.state_dict(), loader.epoch]))
    ezpz_dist.cleanup()
    """
    done = go_through(ranks, 4, "tensor_parallel_size=2", script=textwrap.dedent(stop))
    states = [state for _, _, state, _ in done]
    assert states == [states[0]] * 4
    assert states[0]["position"] == 8
    assert done[3][3] == 0
    had = {share: seen for share, seen, *_ in done}
    assert done[0][1] == done[1][1]
    assert done[2][1] == done[3][1]
    resume = f"loader.load_state_dict({states[0]!r})\n" + GO_THROUGH
    later = go_through(ranks, 2, "tensor_parallel_size=2", script=resume)
    (_, left, *_), (_, left_too, *_) = later
    assert left == left_too
    assert sorted(had[0] + had[1] + list(chain(*left))) == list(range(20))


def test_a_failing_reader_is_everybodys_error(ranks):
    script = """
    from ezpz.data import DataLoader
    ezpz_dist.setup_torch(tensor_parallel_size=2)

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            raise OSError("the disk is gone")

    try:
        list(DataLoader(Broken()))
    except OSError as error:
        print("OSError", error)
    except ezpz_dist.DataError as error:
        print(error)
    ezpz_dist.cleanup()
    """
    reader, other = ranks(2, script)
    assert reader.strip() == "OSError the disk is gone"
    assert other.strip() == (
        "the reader of this rank's batches failed, rank 0: OSError: the disk is gone"
    )


def test_workers_that_cannot_be_started_are_everybodys_error(ranks):
    script = """
    from ezpz.data import DataLoader
    ezpz_dist.setup_torch(tensor_parallel_size=2)
    options = {"num_workers": 1, "multiprocessing_context": "forkserver"}
    try:
        list(DataLoader([1, 2], collate_fn=lambda rows: rows, **options))
    except ezpz_dist.DataError as error:
        print(error)
    except Exception as error:
        print("its own", type(error).__name__)
    ezpz_dist.cleanup()
    """
    reader, other = ranks(2, script)
    assert reader.startswith("its own ")
    assert other.startswith("the reader of this rank's batches failed, rank 0: ")
    assert "lambda" in other


def test_alone_it_is_a_data_loader():
    loader = DataLoader(torch.utils.data.TensorDataset(torch.arange(5)), 2, device="cpu")
    assert loader.is_reader
    assert len(loader) == 3
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert loader.epoch == 1
    loader.set_epoch(0)
    state = loader.state_dict()
    with pytest.raises(DataError, match="another"):
        DataLoader(torch.utils.data.TensorDataset(torch.arange(6))).load_state_dict(state)


def test_a_sampler_and_a_stream_are_refused():
    with pytest.raises(TypeError, match="makes its own"):
        DataLoader(Xs(), sampler=range(3))

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(DataError, match="no indices"):
        DataLoader(Stream())
