"""ezpz_dist under srun: ranks without an address given to them find each other."""


def test_two_steps_of_one_job_derive_an_address_each(slurm, sandbox, program, said_in, tmp_path):
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    both = (
        'srun --exact -N 1 -n 2 "$@" & first=$!; '
        'srun --exact -N 1 -n 2 "$@"; second=$?; '
        "wait $first && exit $second"
    )
    command = ["salloc", "-Q", "-N", "2", "-n", "4", "sh", "-c", both, "sh"]
    done = slurm.run([*command, *program("take_step"), str(said_in), "4", str(meeting)])
    said = sandbox.reports(said_in)
    steps = sorted({one["step"] for one in said})
    assert len(steps) == 2
    for step in steps:
        found = [(one["rank"], one["sums"]) for one in said if one["step"] == step]
        assert found == [(0, [2, 1]), (1, [2, 1])]
        assert done.stderr.count(f"address by derived from Slurm step {step}") == 2
    addresses = {(one["step"], one["address"]) for one in said}
    assert len(addresses) == len({address for _, address in addresses}) == 2
    for _, address in addresses:
        assert address.startswith("127.0.0.1:")
