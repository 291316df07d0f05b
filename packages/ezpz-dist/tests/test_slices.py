"""One reader a node, and each rank's own slice of a file: by plain reads and by MPI-IO."""

import shutil
import socket
import subprocess
import sys

import pytest
import torch

from ezpz_dist import DataError, _slices, read_share

PARTS = """
    rank, n = setup_torch(timeout=30), int(os.environ.get("WORLD_SIZE", 1))

    def refused(call, *words):
        error = raises(DataError, words[0], call)
        print(error)
        assert all(word in str(error) for word in words), error
"""


@pytest.mark.parametrize("n", [1, 4])
def test_one_reader_and_the_others_have_it_from_there(ranks, n):
    script = """
    group = node_group()
    assert group is node_group() and dist.get_world_size(group) == n
    calls = []

    def read():
        calls.append(rank)
        return [torch.full((2, place), float(place)).t() for place in range(n)]
    part = scatter_from_one_reader(read)
    assert part.tolist() == [[float(rank)] * 2] * rank and calls == ([0] if rank == 0 else [])
    assert part.shape == (rank, 2)
    assert scatter_from_one_reader(lambda: [{"rank": at, "t": torch.ones(1)} for at in range(n)]
        )["rank"] == rank
    large = scatter_from_one_reader(lambda: [torch.arange(at, at + 300_000) for at in range(n)])
    assert large[0] == rank and large[-1] == rank + 299_999

    refused(lambda: scatter_from_one_reader(lambda: [1] * (n + 1)),
        f"it returned {n + 1} parts; expected a list, one part for each of {n} ranks")
    refused(lambda: scatter_from_one_reader(lambda: None), "it returned a NoneType; expected a")
    refused(lambda: scatter_from_one_reader(lambda: open("/no")), "FileNotFoundError", "rank 0")
    if n > 1:
        refused(lambda: scatter_from_one_reader(lambda: [1, 2, 3, refused]), "cannot be pickled",
            "the reader, rank 0")
    barrier()
    """
    done = ranks(n, PARTS + script)
    assert len(set(done)) == 1, "the same words on every rank"


def test_two_nodes_have_a_reader_each(ranks):
    script = """
    # One host cannot have several names: what set-up found is replaced.
    import dataclasses
    from ezpz_dist import _world
    world = dataclasses.replace(_world.find_world(), hosts=("a", "b", "a", "b"))
    _world.enter(world)
    assert dist.get_process_group_ranks(node_group()) == [rank % 2, rank % 2 + 2]
    assert scatter_from_one_reader(lambda: [rank, rank + 10]) == rank % 2 + 10 * (rank // 2)
    _world.enter(dataclasses.replace(world, hosts=("a", "b", "c", "d")))
    assert dist.get_process_group_ranks(node_group()) == [rank], "alone, and not all ranks"
    assert scatter_from_one_reader(lambda: [rank]) == rank
    barrier()
    """
    ranks(4, PARTS + script)


def test_ranks_of_a_node_may_be_in_unequally_many_groups(ranks):
    script = """
    dist.new_group([0])
    assert scatter_from_one_reader(lambda: [0, 1]) == rank
    """
    ranks(2, PARTS + script)


READ = """
import os, pathlib, sys
import ezpz_dist, torch
from ezpz_dist import *
from ezpz_dist import _slices as slices
rank = setup_torch(timeout=30)
n, folder = all_reduce(1), sys.argv[1]
int32 = torch.int32

def refused(words, path, *what, by, **more):
    try:
        read_share(f"{folder}/{path}", *what, implementation=by, **more)
    except (DataError, ValueError) as error:
        assert words in str(error), error
        print(error)
    else:
        raise AssertionError(words)

def check(by):
    for piece in (1 << 30, 64):  # also as if more than MPI can count
        slices._PIECE = piece
        for rows in (0, 1, 7, 8):
            whole = torch.arange(rows * 6, dtype=int32).view(rows, 2, 3)
            for asked in (rows, -1):
                mine = read_share(f"{folder}/{rows}", int32, (asked, 2, 3), offset=5,
                    implementation=by)
                assert torch.equal(mine, torch.tensor_split(whole, n)[rank]), (rows, mine)
    whole = read_share(f"{folder}/7", int32, (7, 6), offset=5, share=(0, 1), implementation=by)
    assert whole.flatten().tolist() == list(range(42)), "everybody may read everything"
    far = read_share(f"{folder}/far", torch.uint8, (-1, 3), offset=(1 << 32) + 1, implementation=by)
    expected = torch.tensor_split(torch.tensor([[1, 2, 3], [4, 5, 6]]), n)[rank]
    assert far.tolist() == expected.tolist()
    refused("FileNotFoundError", "no", int32, (3,), by=by)
    refused("it has 173 bytes; expected 197: offset 5 and 8 rows of 24", "7", int32, (8, 6),
        offset=5, by=by)
    refused("168 bytes after offset 5; expected rows of 20", "7", int32, (-1, 5), offset=5, by=by)
    refused("expected rows that hold bytes", "7", int32, (-2, 3), by=by)
    refused("expected rows that hold bytes", "7", int32, (), by=by)
    if n > 1:  # one rank cannot; the others must not wait
        at = "no" if rank == n - 1 else "7"
        refused(f"rank {n - 1} on", at, int32, (7, 6), offset=5, by=by)

check(None)
assert "mpi4py.MPI" not in sys.modules
if sys.argv[2:] == ["mpi"]:
    check("mpi")
    try:  # MPI runs: from now on it is what None means
        read_share(f"{folder}/7", int32, (7, 6), implementation="posix" if rank else None)
    except MismatchError as error:
        assert "calls read_share(implementation='mpi') at" in str(error), error
        assert "calls read_share(implementation='posix') at" in str(error), error
    else:
        raise AssertionError
barrier()
"""


@pytest.fixture
def folder(tmp_path):
    for rows in (0, 1, 7, 8):
        numbers = torch.arange(rows * 6, dtype=torch.int32)
        (tmp_path / str(rows)).write_bytes(b"12345" + bytes(numbers.view(torch.uint8).tolist()))
    with (tmp_path / "far").open("wb") as file:  # beyond what 32 bits count; a hole on the disk
        file.seek((1 << 32) + 1)
        file.write(bytes(range(1, 7)))
    return tmp_path


@pytest.mark.parametrize("n", [1, 4])
def test_each_rank_reads_its_rows(ranks, folder, n):
    done = ranks(n, f"import sys; sys.argv[1:] = [{str(folder)!r}]\n" + READ)
    assert len(set(done)) == 1, "the same words on every rank"


@pytest.mark.slow
def test_by_mpi_io(clean_env, folder):
    mpiexec = shutil.which("mpiexec", path=clean_env["PATH"])
    if mpiexec is None:
        pytest.skip("no mpiexec here")
    script = folder / "script.py"
    script.write_text(READ)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # With an address, so that set-up has no need of MPI: the first read starts it.
    env = {**clean_env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, str(script), str(folder), "mpi"], env=env,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_mpi_where_there_is_none(ranks, folder):
    script = f"""
        setup_torch(timeout=30)
        said = "expected MPI's world to be this job's; start the ranks with"
        given = {{"dtype": torch.int32, "shape": (7, 6), "implementation": "mpi"}}
        raises(CollectiveError, said, read_share, "{folder}/7", **given)
        """
    ranks(2, script)


def test_in_one_process_without_set_up(folder, clean_env, monkeypatch):
    monkeypatch.setattr("os.environ", clean_env)
    row = read_share(folder / "7", torch.int32, (7, 6), offset=5, share=(1, 3))
    assert row.flatten().tolist() == list(range(18, 30))
    with pytest.raises(ValueError, match="implementation 'nfs'; expected 'mpi', 'posix' or None"):
        read_share("x", torch.int8, (1,), implementation="nfs")
    part = torch.zeros(9, dtype=torch.uint8)
    with (folder / "far").open("rb", buffering=0) as file:
        file.seek((1 << 32) + 1)
        with pytest.raises(DataError, match="ended 3 bytes early; expected it not to change"):
            _slices._fill(file, part)
