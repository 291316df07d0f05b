"""srun starts a process on each of four nodes, which bring the environment to their disks."""


def test_four_nodes_stage_and_their_ranks_start_there(slurm, venv, tmp_path):
    prefix, variables = venv
    (tmp_path / "local").mkdir()
    env = {**variables, "TMPDIR": str(tmp_path / "local"), "TORCH_DEVICE": "cpu"}
    code = "import os, sys; print(os.environ['SLURMD_NODENAME'], sys.prefix)"
    words = ["salloc", "-Q", "-N", "4", "-n", "8", prefix / "bin" / "python", "-m", "ezpz_launch"]
    words += ["--ppn", "2", "--stage", "python", "-c", code]
    done = slurm.run(list(map(str, words)), env=env)
    said = sorted(line.split() for line in done.stdout.splitlines())
    assert [node for node, _ in said] == [f"nid00{1 + at // 2}" for at in range(8)]
    (there,) = {where for _, where in said}
    assert there.startswith(f"{tmp_path}/local/ezpz-")
    assert there.endswith(str(prefix))
