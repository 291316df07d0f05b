"""An environment comes to the disks of nodeA and nodeB; a host that cannot take it is named."""

import os
from pathlib import Path

import pytest

CODE = "import os, sys; print(os.uname().nodename, sys.prefix, os.environ['EZPZ_STAGED'])"


@pytest.fixture
def place(hosts, tool, venv, tmp_path):
    """A venv, and how its ezpz-launch is started on nodeA."""
    prefix, variables = venv
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("nodeA\nnodeB\n")
    environment = {
        **hosts.environment,
        **variables,
        "PATH": f"{prefix}/bin:{Path(tool('mpiexec')).parent}:{hosts.environment['PATH']}",
        "TMPDIR": str(hosts.directory / "local"),
    }
    (next(prefix.glob("lib/*/site-packages")) / "mine.py").touch()

    def run(*options, **more):
        words = [prefix / "bin" / "python", "-m", "ezpz_launch", "--hostfile", hostfile, *options]
        return hosts.run(list(map(str, words)), env=environment, **more)

    return run, prefix


def test_each_host_has_it_on_its_own_disk_and_the_second_start_sends_nothing(*, hosts, place):
    run, prefix = place
    done = run("--ppn", "2", "--stage", "python", "-c", CODE)
    said = sorted(line.split() for line in done.stdout.splitlines())
    assert [host for host, _, _ in said] == ["nodeA", "nodeA", "nodeB", "nodeB"]
    tree = said[0][2]
    assert tree.startswith(f"{hosts.directory}/local/ezpz-")
    assert {where for _, where, _ in said} == {f"{tree}{prefix}"}
    for host in ("nodeA", "nodeB"):
        below = tree.removeprefix(f"{hosts.directory}/local")
        there = Path(f"{hosts.directory}/{host}{below}{prefix}")
        assert next(there.glob("lib/*/site-packages/mine.py")).exists()
    again = run("--ppn", "1", "--stage", "python", "-c", CODE)
    assert "0 nodes got 0 MB" in again.stderr
    assert "2 had it already" in again.stderr


def test_a_host_that_cannot_take_it_is_named(*, hosts, place):
    run, _ = place
    (hosts.directory / "nodeB" / f"ezpz-{os.getuid()}").write_text("in the way")
    done = run("--ppn", "1", "--stage", "python", "-c", CODE, expect=1)
    assert "ezpz-launch: not staged on nodeB: " in done.stderr
    assert "expected a folder of this user's own" in done.stderr
    assert "--exclude nodeB" in done.stderr
    assert done.stdout == ""


def test_a_spare_takes_the_place_of_a_host_that_cannot_take_it(*, hosts, place):
    run, _ = place
    (hosts.directory / "nodeA" / f"ezpz-{os.getuid()}").write_text("in the way")
    done = run("-N", "1", "--spares", "1", "--ppn", "1", "--stage", "python", "-c", CODE)
    assert done.stdout.startswith("nodeB ")
    assert "; nodeB takes the place of nodeA" in done.stderr
