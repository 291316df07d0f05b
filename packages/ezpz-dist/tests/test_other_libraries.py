"""After set-up under a bare mpiexec, which exports no MASTER_*, other libraries see the same ranks.

None of them is a requirement of ezpz_dist; each is tested where it is installed (accelerate
1.15, transformers 5.23 and lightning-fabric 2.6 were).
"""

import importlib.util
import shutil
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("library", LIBRARIES)
def test_it_sees_the_same_ranks(clean_env, tmp_path, library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    mpiexec = shutil.which("mpiexec", path=clean_env["PATH"])
    if mpiexec is None:
        pytest.skip("no mpiexec here")
    script = tmp_path / "script.py"
    script.write_text(HEAD + LIBRARIES[library] + TAIL)
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, str(script), str(tmp_path / "out")],
        env={**clean_env, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 0 agrees" in done.stdout
    assert "rank 1 agrees" in done.stdout
    assert list(tmp_path.iterdir()) == [script], "nothing was written"
