"""ezpz-launch from nodeA, on nodeA and nodeB, by Hydra: the right places, and the same end.

Hydra reaches a host as by ssh: with a login's environment, not with that of the launch.
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAULTS = Path(__file__).resolve().parents[1] / "faults"
PLACES = [("nodeA", 0, 0), ("nodeA", 0, 1), ("nodeB", 1, 0), ("nodeB", 1, 1)]

# A login's environment: what the ranks need else, the launcher brings.
_LOGIN = """\
#!/bin/sh
exec env -i PATH=/usr/local/bin:/usr/bin:/bin HOME="$HOME" {launcher} "$@"
"""


def _load(name):
    """Import a module of the fault table by path."""
    qualified = f"tests.faults.{name}"
    if qualified not in sys.modules:
        spec = importlib.util.spec_from_file_location(qualified, FAULTS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[qualified] = module
        spec.loader.exec_module(module)
    return sys.modules[qualified]


launches = _load("launches")


@pytest.fixture
def launch(hosts, tool, tmp_path):
    """Start ezpz-launch on nodeA with four ranks, two a host; rank 1 is on nodeA, 2 on nodeB."""
    login = tmp_path / "login"
    login.write_text(_LOGIN.format(launcher=hosts.environment["HYDRA_LAUNCHER_EXEC"]))
    login.chmod(0o755)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("nodeA\nnodeB\n")
    commands = Path(tool("mpiexec")).parent
    environment = {
        **hosts.environment,
        "HYDRA_LAUNCHER_EXEC": str(login),
        "PATH": f"{commands}:{hosts.environment['PATH']}",
    }

    def processes():
        """Those of both hosts, though they have no variable of ours."""
        found = [
            f"{entry.name}: {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ')!r}"
            for name in namespaces
            for entry in map(Path, _in_namespace(name))
            if entry.exists()
        ]
        return "\n".join(found)

    namespaces = [f"{hosts.directory.name}-{host}" for host in ("nodeA", "nodeB")]
    place = launches.Place(
        launcher="hydra",
        environment=environment,
        hosts=["nodeA", "nodeA", "nodeB", "nodeB"],
        options=["-n", "4", "--ppn", "2", "--hostfile", str(hostfile)],
        enter=[str(hosts.directory / "enter"), "nodeA"],
        leftovers=processes,
    )
    running = []

    def start(options, command, **more):
        running.append(launches.Launch(place, tmp_path, options, command, **more))
        return running[-1].__enter__()

    yield start
    for each in running:
        each.__exit__()


def _in_namespace(name):
    answer = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
    )
    return [f"/proc/{pid}" for pid in answer.stdout.split()]


rank_program = launches.rank_program


def place_of(said):
    env = said["environment"]
    return said["host"], int(env["NODE_RANK"]), int(env["LOCAL_RANK"])


WORDS = ["", "a b", "it's", '"q"', "$(touch executed)", "`touch executed`", "new\nline", "*", ":"]


def test_places_words_and_values(launch):
    values = {"TEST_VALUE": "a 'b' \"c\" $(touch executed)\nnext"}
    options = ["--env", f"TEST_TOLD={values['TEST_VALUE']}"]
    started = launch(options, rank_program("says", *WORDS), environment=values)
    assert started.ends(within=10) == 0, started.stderr
    said = started.ranks(4)
    assert [place_of(one) for one in said] == PLACES
    for rank, one in enumerate(said):
        env = one["environment"]
        assert one["words"][1:] == WORDS
        assert env["TEST_VALUE"] == env["TEST_TOLD"] == values["TEST_VALUE"]
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == (str(rank), "4", "2")
        assert env["MASTER_ADDR"] == "nodeA"
        assert env["MASTER_PORT"] == said[0]["environment"]["MASTER_PORT"]
    assert not list(started.folder.rglob("executed"))
    started.leaves_nothing()


def test_a_place_to_meet_that_is_no_host_is_told_once_and_early(launch):
    started = launch(["--env", "MASTER_ADDR=nodeX"], rank_program("waits"))
    started.ranks(4)
    line = "MASTER_ADDR=nodeX (--env) cannot be looked up on this host"
    started.until(lambda: line in started.stderr, "the name is told", 60)
    started.process.send_signal(signal.SIGTERM)
    started.ends(within=15)
    assert started.stderr.count(line) == 1


def test_an_unmodified_torchrun_script_trains(launch):
    script = [sys.executable, str(FAULTS / "programs" / "ddp_tutorial.py"), "report.json"]
    started = launch(["--env", "OMP_NUM_THREADS=1"], script)
    assert started.ends(within=90) == 0, started.stderr
    said = json.loads((started.folder / "report.json").read_text())
    assert [(one["rank"], one["host"], one["local_rank"]) for one in said] == [
        (rank, host, local) for rank, (host, _, local) in enumerate(PLACES)
    ]
    for one in said:
        assert one["world_size"] == 4
        assert one["weights"] == said[0]["weights"]
        assert one["losses"][-1] < 0.7 * one["losses"][0]
    assert len({one["losses"][0] for one in said}) == 4, "each trains on its own data"
    # torch's own caches are in TMPDIR.
    started.leaves_nothing(files=True)


def test_a_rank_fails(launch):
    started = launch(["--grace", "2"], rank_program("dies", "SIGKILL"))
    started.ranks(4)
    assert started.ends(within=5) == 137, started.stderr
    (line,) = (line for line in started.stderr.splitlines() if "first of all ranks" in line)
    how = "was killed by SIGKILL (exit status 137), first of all ranks"
    assert line.startswith(f"ezpz-launch: rank 1 on nodeA {how}")
    started.leaves_nothing()


def test_survivors_that_ignore_sigterm_are_killed_on_both_hosts(launch):
    started = launch(["--grace", "1.5"], rank_program("stays_deaf"))
    started.ranks(4)
    assert started.ends(within=4.5) == 3, started.stderr
    assert [started.heard(rank) for rank in range(4)] == [["SIGTERM"], [], ["SIGTERM"], ["SIGTERM"]]
    started.leaves_nothing()


@pytest.mark.parametrize("holds", ["holds", "not"])
def test_what_a_rank_leaves_is_ended(launch, holds, tmp_path):
    """After a success, too; where mpiexec waits for its output, it is named."""
    # On a terminal: elsewhere what it has is our own pump's, which mpiexec does not wait for.
    master, slave = os.openpty()
    os.set_blocking(master, False)
    words = ["sh", "-c", 'exec "$@" >"$0" 2>&1', os.ttyname(slave), sys.executable, "-m"]
    words += ["ezpz_launch", "--hostfile", str(tmp_path / "hostfile"), "-n", "4", "--ppn", "2"]
    started = launch([], rank_program("leaves_a_helper", holds, ""), bare=words)
    started.ranks(4)
    assert started.ends(within=10) == 0, started.stderr
    said = ""
    with contextlib.suppress(BlockingIOError):
        while True:
            said += os.read(master, 4096).decode()
    named = re.findall(r"a rank left pid \d+ \(sleep 60\) on nodeA running", said)
    assert len(named) == (holds == "holds"), said
    started.leaves_nothing()
    os.close(master)
    os.close(slave)


def test_sigterm_leaves_5_s_for_a_checkpoint(launch):
    started = launch([], rank_program("checkpoints", "5"))
    started.ranks(4)
    began = time.monotonic()
    started.process.send_signal(signal.SIGTERM)
    assert started.ends(within=7) == 143, started.stderr
    assert time.monotonic() - began > 4.9
    assert started.done() == [0, 1, 2, 3]
    assert [started.heard(rank) for rank in range(4)] == [["SIGTERM"]] * 4
    started.leaves_nothing()


def test_sigusr1_and_sigusr2_reach_the_ranks_of_both_hosts_and_end_nothing(launch):
    started = launch([], rank_program("goes_on"))
    started.ranks(4)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        started.process.send_signal(number)
        started.all_hear(number.name)
    (started.said / "go").touch()
    assert started.ends(within=5) == 0, started.stderr
    assert [started.heard(rank) for rank in range(4)] == [["SIGUSR1", "SIGUSR2"]] * 4
    started.leaves_nothing()


def test_hang(launch):
    started = launch(["--idle-timeout", "3", "--grace", "2"], rank_program("hangs"))
    started.ranks(4)
    assert started.ends(within=15) == 124, started.stderr
    assert len(re.findall(r"stuck_here \(|in stuck_here", started.stderr)) == 3, started.stderr
    (line,) = (line for line in started.stderr.splitlines() if "no output for 3 s" in line)
    named = [("1", "nodeA"), ("2", "nodeB"), ("3", "nodeB")]
    assert re.findall(r"(\d) on (node\w)", line) == named
    started.leaves_nothing()


def test_ezpz_launch_is_killed(launch):
    started = launch(["--grace", "1"], rank_program("goes_on"))
    started.ranks(4)
    os.kill(started.process.pid, signal.SIGKILL)
    started.leaves_nothing(within=3, files=True)
    assert started.done() == []


def test_the_launcher_is_killed(launch):
    started = launch(["--grace", "1"], rank_program("waits"))
    started.ranks(4)
    os.kill(started.launcher(), signal.SIGKILL)
    assert started.ends(within=4) == 137, started.stderr
    started.leaves_nothing()


def test_the_other_host_s_launcher_is_killed(launch):
    """As where the ssh to it breaks, or somebody ends the proxy there."""
    started = launch(["--grace", "1"], rank_program("waits"))
    started.ranks(4)
    os.kill(started.parent(started.shim(2)), signal.SIGKILL)
    assert started.ends(within=6) != 0, started.stderr
    started.leaves_nothing()


def test_a_lost_host_is_named(launch, hosts):
    started = launch(["--grace", "1"], rank_program("goes_on"))
    started.ranks(4)
    # Signals go through the agents, so they are there.
    started.process.send_signal(signal.SIGUSR1)
    started.all_hear("SIGUSR1")
    assert "no agent on" not in started.stderr
    hosts.set_link("nodeB", "down")
    began = time.monotonic()
    started.until(lambda: "nodeB is lost" in started.stderr, "it is named", 60)
    # 15 s are promised; the rest is for a busy machine.
    assert time.monotonic() - began < 25
    assert started.ends(within=10) == 137, started.stderr
    assert "no answer within 15 s (EZPZ_NODE_TIMEOUT)" in started.stderr
    assert "rank 2 on nodeB is lost with its node; ending the other ranks" in started.stderr
    # What is on the lost host ends there, by its agent.
    started.leaves_nothing(within=20)


def test_a_host_that_is_back_in_time_is_not_lost(launch, hosts):
    started = launch([], rank_program("goes_on"), environment={"EZPZ_NODE_TIMEOUT": "60"})
    started.ranks(4)
    hosts.set_link("nodeB", "down")
    time.sleep(16)
    hosts.set_link("nodeB", "up")
    (started.said / "go").touch()
    assert started.ends(within=30) == 0, started.stderr
    started.leaves_nothing()
