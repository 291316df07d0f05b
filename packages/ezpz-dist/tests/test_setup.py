"""Set-up in its ordinary course, what it refuses before it has begun, and seeds."""

import importlib.util
import random
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

from ezpz_dist import seed_everything, seed_for_rank
from ezpz_dist._setup import MAX_RANKS, MAX_SEED, STREAMS

REFUSED = """
def refused(text, kind=SetupError, **arguments):
    raises(kind, text, setup_torch, **{"timeout": 60, **arguments})
"""


@pytest.mark.parametrize("n", [1, 2])
def test_set_up_twice_clean_up_and_again(ranks, n):
    script = """
        n, own = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        before, hook = dict(os.environ), sys.excepthook
        refused("timeout 0; expected seconds, above 0 and", ValueError, timeout=0)
        refused("timeout inf; expected seconds", ValueError, timeout=float("inf"))
        refused("seed -1; expected 0 to", ValueError, seed=-1)
        refused("'smoke' is not in this torch", backend="smoke")
        dist.init_process_group(
            "gloo", store=dist.HashStore() if n == 1 else None, rank=own, world_size=n
        )
        refused("a process group exists already")
        dist.barrier()  # the store of rank 0 goes with its group; the others are still in theirs
        dist.destroy_process_group()
        sys.excepthook = hook

        import ezpz_tp
        refused("", Exception, tensor_parallel_size=3)
        refused("failed half-way before", tensor_parallel_size=3)
        cleanup()
        assert not dist.is_initialized() and dict(os.environ) == before

        class Index:  # as numpy's integers are
            def __index__(self):
                return 3
        assert setup_torch(seed=Index(), timeout=60) == own == dist.get_rank()
        assert dist.get_world_size() == n
        assert not ezpz_tp.tensor_parallel_is_initialized(), "not requested"
        assert setup_torch(seed=3, timeout=60) == own
        refused("called with seed=3, and now with seed=4; expected the same", seed=4)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
                 "MASTER_ADDR", "MASTER_PORT")
        if n == 1:
            assert {os.environ.get(name) for name in names} == {None}
        else:
            seen = [os.environ[name] for name in names[:6]]
            assert seen == [str(own), "2", str(own), "2", "0", "0"]
        cleanup()
        cleanup()
        assert not dist.is_initialized()
        assert dict(os.environ) == before and sys.excepthook is hook
        assert setup_torch(seed=4, timeout=60) == own
        dist.destroy_process_group()
        assert setup_torch(seed=5, timeout=60) == own, "anew: the script took the group down itself"
        assert all_reduce(1) == n
        cleanup()

        # A degree of one has its groups too; the node's cores are shared among its ranks, unless
        # a launcher bound this one to its cores and so has shared them already.
        os.environ.pop("OMP_NUM_THREADS", None)
        os.cpu_count = lambda: 6
        for allowed, threads in ((6, 5 if n == 1 else 3), (3, 5)):
            ezpz_dist._setup.get_cpu_count = lambda: allowed
            torch.set_num_threads(5)
            setup_torch(timeout=60, tensor_parallel_size=1)
            assert torch.get_num_threads() == threads
            assert ezpz_tp.get_tensor_parallel_world_size() == 1
            assert ezpz_tp.get_data_parallel_world_size() == n
            cleanup()
            assert not ezpz_tp.tensor_parallel_is_initialized()
        """
    ranks(n, REFUSED + textwrap.dedent(script))


@pytest.mark.slow
def test_many_set_ups_with_a_model_that_outlives_the_group(ranks):
    # torch's gloo destructor can wait for the GIL for ever (see _cleanup._retired), and a
    # store that a model still holds keeps the keys of the group before.
    script = """
        import faulthandler
        kept = None
        for i in range(40):
            faulthandler.dump_traceback_later(120, exit=True)
            setup_torch(timeout=120)
            model = wrap_model(torch.nn.Linear(4, 4))
            model(torch.rand(2, 4)).sum().backward()
            all_reduce(1)
            cleanup()
            kept = model if i % 2 else kept
        faulthandler.cancel_dump_traceback_later()
        """
    ranks(2, script)


def test_ranks_that_are_functions_of_multiprocessing_clean_up_too(ranks):
    # As notebooks start them. Rank 0, which holds the store, is done long before the other.
    script = """
        import time
        rank = setup_torch(timeout=30)
        if rank == 1:
            time.sleep(1)
            dist.distributed_c10d._get_default_store().add("late", 1)
            print("still there")
        """
    done = ranks(2, script)
    assert done == ["", "still there\n"]


def test_a_function_of_multiprocessing_that_raises_ends_all_ranks(ranks):
    script = """
        import time
        rank = setup_torch(timeout=30)
        if rank == 1:
            raise ValueError("no such file")
        time.sleep(50)
        """
    ends = ranks(2, script, check=False)
    assert [status for status, _, _ in ends] == [1, 1]
    assert re.search(r"rank 1 on .+ failed at .+ ValueError: no such file", ends[0][2])


# After set-up under a bare mpiexec, which exports no MASTER_*, other libraries see the same ranks.

# None of them is a requirement of ezpz_dist; each is tested where it is installed (accelerate
# 1.15, transformers 5.23 and lightning-fabric 2.6 were).
HEAD = """
import sys
import ezpz_dist, torch
rank = ezpz_dist.setup_torch(timeout=60)
group = torch.distributed.group.WORLD
"""

TAIL = """
assert torch.distributed.group.WORLD is group, "a group of its own"
ezpz_dist.cleanup()
sys.stdout.write(f"rank {rank} agrees\\n")  # whole: the ranks share the pipe
sys.stdout.flush()
"""

LIBRARIES = {
    # Without cpu=True or ACCELERATE_USE_CPU accelerate takes every rank on CPUs for a world of one.
    "accelerate": """
from accelerate import Accelerator
from accelerate.state import PartialState
one = Accelerator()
state = PartialState()
assert (state.num_processes, state.process_index, state.local_process_index) == (2, rank, rank)
assert state.device.type == "cpu" and state.backend == "gloo"
assert one.gather(torch.tensor([rank])).tolist() == [0, 1]
""",
    "transformers": """
from transformers import TrainingArguments
one = TrainingArguments(output_dir=sys.argv[1], report_to=[])
assert (one.world_size, one.process_index, one.local_process_index) == (2, rank, rank)
assert one.parallel_mode.name == "DISTRIBUTED" and one.device.type == "cpu"
""",
    "lightning_fabric": """
from lightning_fabric import Fabric
one = Fabric(accelerator="cpu", devices=2, strategy="ddp")
one.launch()
assert (one.world_size, one.global_rank, one.local_rank) == (2, rank, rank)
assert one.all_gather(torch.tensor(rank)).tolist() == [0, 1]
""",
}


@pytest.mark.slow
def test_other_libraries_see_the_same_ranks(clean_env, tmp_path):
    there = [library for library in LIBRARIES if importlib.util.find_spec(library)]
    if not there:
        pytest.skip(f"none of {', '.join(LIBRARIES)} is installed")
    mpiexec = shutil.which("mpiexec", path=clean_env["PATH"])
    if mpiexec is None:
        pytest.skip("no mpiexec here")
    script = tmp_path / "script.py"
    script.write_text("".join([HEAD, *map(LIBRARIES.get, there), TAIL]))
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, str(script), str(tmp_path / "out")],
        env={**clean_env, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 0 agrees" in done.stdout
    assert "rank 1 agrees" in done.stdout
    assert list(tmp_path.iterdir()) == [script], "nothing was written"


@pytest.mark.parametrize("debug", ["", "1"])
def test_a_hang_that_ends_a_script_says_its_sentence_first(programs, debug):
    code = """
import contextlib, ezpz_dist
ezpz_dist.setup_torch(backend="gloo")
ours = '''
@contextlib.contextmanager
def of_ours():
    with contextlib.suppress(ValueError):
        yield
    raise error
'''
exec(compile(ours, ezpz_dist.__path__[0] + "/_collectives.py", "exec"))
error = ezpz_dist.HangError("who is missing")
with of_ours():
    raise ValueError
"""
    ((status, _, errors),) = programs(1, code, env={"EZPZ_DEBUG": debug})
    lines = errors.replace("[rank0]: ", "").splitlines()
    assert status == 1
    first, last = ("Traceback", "ezpz_dist._errors.HangError: ") if debug else ("HangError: ", "  ")
    assert lines[0].startswith(first)
    assert lines[-1].startswith(last)
    assert ("in of_ours" in errors) == ("contextlib" in errors) == bool(debug)


# Seeds.


def draws():
    mine = [random.random(), torch.rand(1).item()]
    # torch does without it, and so do we
    if importlib.util.find_spec("numpy"):
        mine.append(float(importlib.import_module("numpy").random.rand()))
    return mine


def test_a_seed_repeats_itself_and_ranks_draw_differently():
    seen = {}
    for rank in (*range(8), 3):
        seed_everything(7, rank=rank)
        assert seen.setdefault(rank, found := draws()) == found
    assert len({each for found in seen.values() for each in found}) == 8 * len(found)


def test_no_two_seeds_collide_and_the_largest_fits_torch():
    # the predecessor's seed * (rank + 1) * (local_rank + 1) gives ranks 2 and 8 the same
    seeds = [
        seed_for_rank(seed, rank, stream)
        for seed in (0, 1, 42, MAX_SEED - 1)
        for rank in (*range(4096), MAX_RANKS - 1)
        for stream in STREAMS
    ]
    assert len(set(seeds)) == len(seeds)
    torch.manual_seed(max(seeds))


@pytest.mark.parametrize(("seed", "rank"), [(-1, 0), (MAX_SEED, 0), (0, -1), (0, MAX_RANKS)])
def test_out_of_range(seed, rank):
    with pytest.raises(ValueError, match="expected 0 to"):
        seed_for_rank(seed, rank)


@pytest.mark.parametrize(("kind", "backend"), [("xpu", "xccl"), ("cuda", "nccl")])
def test_the_group_is_bound_to_a_device_only_where_meshes_can_split_it(kind, backend, ranks):
    """torch's DeviceMesh splits a bound group; XCCL has no such call (pytorch/pytorch#186548)."""
    (said,) = ranks(
        1,
        f"""
        from types import SimpleNamespace
        from ezpz_dist import _setup
        def init(backend, device_id=None, **_):
            print(backend, device_id)
            sys.stdout.flush()
            os._exit(0)
        dist.init_process_group = init
        _setup.get_torch_device = lambda: "{kind}:0"
        _setup.get_torch_backend = lambda *_: "{backend}"
        torch.{kind}.set_device = lambda device: None
        setup_torch(timeout=60)
        """,
    )
    assert said.split() == [backend, "cuda:0" if kind == "cuda" else "None"]
