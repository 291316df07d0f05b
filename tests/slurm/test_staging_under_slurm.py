"""srun starts a process on each of four nodes, which bring the environment to their disks."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path


def test_four_nodes_stage_and_their_ranks_start_there(slurm, tmp_path):
    import ezpz_launch
    import ezpz_topo

    own = [str(Path(package.__file__).parents[1]) for package in (ezpz_launch, ezpz_topo)]
    prefix = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    (tmp_path / "local").mkdir()
    env = {
        "PATH": f"{prefix}/bin:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([sysconfig.get_path("purelib"), *own]),
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "local"),
        "EZPZ_STATE_DIR": str(tmp_path / "state"),
        "TORCH_DEVICE": "cpu",
    }
    code = "import os, sys; print(os.environ['SLURMD_NODENAME'], sys.prefix)"
    words = ["salloc", "-Q", "-N", "4", "-n", "8", prefix / "bin" / "python", "-m", "ezpz_launch"]
    words += ["--ppn", "2", "--stage", "python", "-c", code]
    done = slurm.run(list(map(str, words)), env=env)
    said = sorted(line.split() for line in done.stdout.splitlines())
    assert [node for node, _ in said] == [f"nid00{1 + at // 2}" for at in range(8)]
    (there,) = {where for _, where in said}
    assert there.startswith(f"{tmp_path}/local/ezpz-")
    assert there.endswith(str(prefix))
