"""How ranks meet under each launcher that can run here, and what is said when they cannot."""

import errno
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, TCPStore

from ezpz_dist import SetupError, _addresses, _mpi, _rendezvous
from ezpz_dist._addresses import gloo_interface, listen
from ezpz_dist._members import agree
from ezpz_dist._rendezvous import (
    PORTS,
    Job,
    NotOurStoreError,
    Place,
    RefusedError,
    candidates,
    connect,
    find_server,
    open_server,
    rendezvous,
)
from ezpz_topo import RankInfo, get_hostname

SECOND = timedelta(seconds=1)
MINUTE = timedelta(seconds=60)


def meet(infos, env, timeout=MINUTE):
    """Have ranks of this process agree, and return the rendezvous that each has joined."""
    met = [rendezvous(each, timeout, env) for each in infos]

    def join(one, each):
        process, seconds = (get_hostname(), each.rank, 1), timeout.total_seconds()
        agreed = agree(one.participant(each, "test", seconds), each, seconds, {}, process)
        agreed.wakeup.close()
        return one.join(agreed.store, each, timeout)

    with ThreadPoolExecutor(len(met)) as pool:
        return list(pool.map(join, met, infos))


def info(launcher="torchrun", rank=1, world_size=2, local_world_size=2, local_rank=0):
    return RankInfo(rank, world_size, local_rank, local_world_size, None, launcher)


@pytest.fixture
def opened():
    """Open rank 0's server, as `open_server` does, and serve there."""
    servers = []

    def opens(where, zero=None):
        met = open_server(where, zero or info(rank=0), SECOND)
        servers.append(met.server)
        met.server.tell(_addresses.Round(), b"")
        return met

    yield opens
    for server in servers:
        server.close()
        for key in list(server._selector.get_map().values()):
            key.fileobj.close()


ZERO, TWO_NODES = info(rank=0), info(local_world_size=1)


# Under real launchers.

# Meets twice: MPI is to be finalized once all the same, and a store is not to be closed between.
SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.INFO)
import ezpz_dist
rank = ezpz_dist.setup_torch(timeout=60)
assert ezpz_dist.all_reduce(rank + 1) == 3
ezpz_dist.cleanup()
ezpz_dist.setup_torch(timeout=60)
ezpz_dist.barrier()
if sys.argv[1] == "exit" and rank == 1:
    sys.exit(3)
ezpz_dist.barrier()
print("done", flush=True)
"""
# A rank has left before MPI_Init; rank 0 is in MPI, and elsewhere.
ABSENT = """
import logging, os, sys, time
logging.basicConfig()
absent, mode = sys.argv[1:]
if mode == "late":
    from mpi4py import MPI
if os.environ["PMI_RANK"] == absent:
    if mode == "late":
        time.sleep(60)
    sys.exit(3)
import ezpz_dist
from ezpz_dist import _mpi as mpi
mpi.SAY_AFTER = 0.2
ezpz_dist.setup_torch(timeout=2)
"""
MPIEXEC = ["mpiexec", "-n", "2", sys.executable]
TORCHRUN = ["torchrun", "--nproc-per-node", "2"]


@pytest.fixture
def launch(clean_env, tmp_path):
    """Run a script under a launcher, once for each tuple of arguments, all at once."""

    def run(launcher, text, *cases):
        path = shutil.which(launcher[0], path=clean_env["PATH"])
        if path is None:
            pytest.skip(f"no {launcher[0]} here")
        script = tmp_path / "script.py"
        script.write_text(text)
        started = [
            subprocess.Popen(
                [path, *launcher[1:], str(script), *case],
                env=clean_env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )
            for case in cases
        ]  # fmt: skip
        try:
            ends = [process.communicate() for process in started]
        finally:
            for process in started:
                process.kill()
        return [(one.returncode, *end) for one, end in zip(started, ends, strict=True)]

    return run


@pytest.mark.slow
def test_bare_mpiexec_broadcasts_the_address_and_no_rank_outlives_another(launch):
    run, left = launch(MPIEXEC, SCRIPT, ["run"], ["exit"])
    assert run[0] == 0, run[2]
    assert run[1].count("done") == 2
    assert "ranks by pmi, address by bound by rank 0, broadcast over MPI" in run[2]
    # without it, the rank would wait in MPI_Finalize for peers that wait for it
    assert left[0] != 0


@pytest.mark.slow
def test_torchrun(launch):
    ((code, out, err),) = launch(TORCHRUN, SCRIPT, ["run"])
    assert code == 0, err
    assert out.count("done") == 2
    assert "ranks by torchrun, address by MASTER_ADDR and MASTER_PORT" in err


@pytest.mark.slow
def test_a_rank_that_never_comes_under_bare_mpiexec(launch):
    early, late = launch(MPIEXEC, ABSENT, ["1", "early"], ["0", "late"])
    assert early[0] != 0
    assert "Timeout (0:00:03)!" in early[2]
    assert f"in rank 0 of 2 on {get_hostname()}: waits in MPI for the others" in early[2]
    assert late[0] != 0
    here = f"rank 1 of 2 on {get_hostname()} has waited"
    assert f"{here} 0 s in MPI for rank 0 to broadcast the address" in late[2]
    assert f"SetupError: {here} 2 s in MPI for rank 0 to broadcast the address" in late[2]


# MPI as far as we need it: initialized by us or by the script, finalized once, or not there.

# One process can be a world of MPI without a launcher.
MPI_ALONE = """
import atexit, sys
import mpi4py
from ezpz_dist import SetupError
from ezpz_dist import _mpi as mpi
from ezpz_topo import RankInfo
alone = RankInfo(0, 1, 0, 1, 0, "pmi")
"""
BY_US = """
print(mpi.broadcast_once(("h\\u00e4", 7, ""), alone, 60))
try:
    mpi.broadcast_once(("h", 7, ""), RankInfo(1, 2, 1, 2, 0, "pmi"), 60)
except SetupError as error:
    print(error)
"""
LEFT_TO_THE_SCRIPT = """
mpi4py.rc.initialize = False
# Runs after what is registered later.
atexit.register(lambda: print("finalized", sys.modules["mpi4py.MPI"].Is_finalized()))
"""
FAILS = """
try:
    mpi.broadcast_once(("h", 7, ""), alone, 60)
except SetupError as error:
    print(error)
"""
SAID = (
    "('h\u00e4', 7, '')\n"
    "mpi4py sees rank 0 of 1, the launcher (pmi) says 1 of 2: mpi4py loaded another MPI ("
)
FINALIZED = "MPI was finalized before setup_torch, which needs it"
NO_MPI = "MASTER_ADDR and MASTER_PORT are not set and mpi4py cannot load an MPI ("


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BY_US, SAID),
        ("from mpi4py import MPI" + BY_US, SAID),
        ("from mpi4py import MPI; MPI.Finalize()" + FAILS, FINALIZED),
        ("sys.modules['mpi4py.MPI'] = None" + FAILS, NO_MPI),
        (LEFT_TO_THE_SCRIPT + BY_US, SAID),
    ],
)
def test_mpi_is_initialized_by_us_or_by_the_script_or_cannot_be_had(programs, text, said):
    ((status, told, errors),) = programs(1, MPI_ALONE + text)
    assert (status, errors) == (0, "")
    assert told.startswith(said)
    assert "ezpz-launch" in told
    # What the script was to initialize is finalized by us.
    assert told.endswith("finalized True\n") == text.startswith(LEFT_TO_THE_SCRIPT)


def test_rank_0s_trouble_is_everyones(monkeypatch):
    monkeypatch.setattr(_mpi, "broadcast_once", lambda value, info, timeout: ("", 0, "no address"))
    with pytest.raises(SetupError, match=r"^no address$"):
        rendezvous(info("pmi"), SECOND, {})


# An address that all ranks know.

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}


@pytest.mark.parametrize(
    ("launcher", "env", "said"),
    [
        ("torchrun", {}, "rank 1 of 2 (torchrun) has no MASTER_ADDR and MASTER_PORT;"),
        ("torchrun", {"MASTER_ADDR": "127.0.0.1"}, "rank 1 of 2 (torchrun) has no MASTER_PORT;"),
        ("torchrun", {"MASTER_PORT": "29500"}, "rank 1 of 2 (torchrun) has no MASTER_ADDR;"),
        *(
            ("torchrun", {"MASTER_ADDR": "h", "MASTER_PORT": port},
             f"MASTER_PORT='{port}'; expected a port number")
            for port in ("x", "0", "65536", "-1")
        ),
        ("slurm", {**STEP, "SLURM_STEP_NODELIST": "no-such-host.invalid,b"},
         f"rank 1 of 2 on {get_hostname()}: the step's first host is 'no-such-host.invalid', whic"),
    ],
)  # fmt: skip
def test_no_address(monkeypatch, launcher, env, said):
    monkeypatch.setattr(_addresses, "_RETRIED", 0.1)  # the whole time is tested below
    with pytest.raises(SetupError, match=re.escape(said)):
        rendezvous(info(launcher, local_world_size=1), timedelta(seconds=60), env)


def test_a_slurm_steps_ranks_derive_the_same_address():
    first = rendezvous(info("slurm", rank=0, world_size=1), SECOND, STEP)
    assert first.place.source == "a world of one"
    found = [info("slurm", rank=rank, local_world_size=1) for rank in (0, 1)]
    zero, one = meet(found, STEP)
    assert (zero.master_addr, zero.master_port) == (one.master_addr, one.master_port)
    assert zero.master_addr == "localhost"
    zero.store.set("k", "v")
    assert one.store.get("k") == b"v"
    # Were rank 0 to open another, the others could still meet the first.
    assert rendezvous(found[0], SECOND, STEP) is rendezvous(found[0], SECOND, STEP)
    others = [{**STEP, "SLURM_STEP_ID": str(step)} for step in range(1, 6)]
    ports = {rendezvous(info("slurm", rank=0), SECOND, step).master_port for step in others}
    assert len(ports) == 5


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


# Which of the first two is seen is chance.
GONE = "a listener that (breaks off|closes the connection)"
HOLDERS = {
    "resets": GONE,
    "closes": GONE,
    "http": r"a listener that is no store of torch \(it answers b'HTTP'\)",
    "ssh": r"a listener that is not rank 0 \(it says b'SSH-'\)",
    "silent": r"a listener that says nothing for 0.5 s",
    "torch": "a store of torch that no ezpz_dist opened",
    "another job": rf"rank 0 of another job, process {os.getpid()} on \S+ \(Slurm job 8, not",
}


def test_whoever_holds_the_port_the_ranks_meet_elsewhere(listener, store, opened, caplog):
    # As the same user's, on a port that he gave to two jobs.
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    job = Job.of(info(), port, {"SLURM_JOB_ID": "8"})
    ports = {
        **{kind: listener(kind) for kind in ("resets", "closes", "http", "ssh", "silent")},
        "torch": store.port,
        "another job": opened(place(port, 0, job=job)).master_port,
    }
    for kind, port in ports.items():
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SLURM_JOB_ID": "7"}
        start = time.monotonic()
        found = rendezvous(ZERO, MINUTE, env).master_port
        zero, one = meet([ZERO, info()], env)
        assert time.monotonic() - start < 20  # torch's own client: 22 s, or for ever
        zero.store.set("kind", kind)
        assert one.store.get("kind") == one.connect(MINUTE).get("kind") == kind.encode()
        assert found == candidates(port)[1]
        logged = f"rank 0 listens on port {found}, for 127.0.0.1:{port} (MASTER_ADDR and MAS"
        (line,) = [line for line in caplog.messages if logged in line]
        assert re.search(f"held by {HOLDERS[kind]}", line), line


def test_addresses_of_ipv6_and_names():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    for host, address in (("[::1]", "::1"), ("::1", "::1"), ("localhost", "localhost")):
        with listen("", 0) as free:
            port = free.getsockname()[1]
        zero, one = meet([ZERO, info()], {"MASTER_ADDR": host, "MASTER_PORT": str(port)})
        zero.store.set("host", host)
        assert one.store.get("host") == host.encode()
        assert zero.master_addr == one.master_addr == address


def test_rank_0_never_comes(monkeypatch, caplog):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    monkeypatch.setattr(_rendezvous, "SAY_AFTER", 0.1)
    start = time.monotonic()
    with pytest.raises(SetupError) as caught, caplog.at_level(logging.WARNING):
        find_server(rendezvous(info(), SECOND, env).place, info(), 1.0)
    assert 1 <= time.monotonic() - start < 120
    waits = (
        f"for rank 0 at 127.0.0.1:{port} (MASTER_ADDR and MASTER_PORT), and finds at "
        f"127.0.0.1:{port}: connection refused; "
    )
    here = f"rank 1 of 2 on {get_hostname()} has waited"
    assert str(caught.value).startswith(f"{here} 1 s {waits}")
    assert "expected rank 0 to call setup_torch and listen there" in str(caught.value)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{here} 0 s {waits[:-2]}")
    caplog.clear()
    third = info(rank=3, world_size=4, local_world_size=4, local_rank=1)
    with pytest.raises(SetupError):
        find_server(rendezvous(third, SECOND, env).place, third, 0.2)
    assert not caplog.records, "one rank a node says it"


def test_torchruns_agent_holds_the_store(store):
    env = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    first = meet([info(rank=rank) for rank in (0, 1)], env)
    first[0].store.set("k", "old")
    assert first[1].store.get("k") == b"old"
    assert first[1].connect(SECOND).get("k") == b"old"
    assert first[0].master_port == first[1].master_port == store.port
    again = rendezvous(info(rank=0), SECOND, {**env, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert not again.store.check(["k"])
    # A leftover of torchrun below another launcher: rank 0 opens a store of its own.
    other = rendezvous(info("ezpz", rank=0), SECOND, env)
    assert other.master_port == candidates(store.port)[1]


def test_a_store_that_is_gone():
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    port = store.port
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with pytest.raises(
        SetupError, match=r"rank 1 of 2 on \S+ heard nothing from rank 0 by torchrun"
    ):
        rendezvous(info(), SECOND, env)
    met = rendezvous(info(rank=0), SECOND, env)
    del store
    said = rf"rank 0's store at 127.0.0.1:{port} \(MASTER_ADDR and MASTER_PORT\) is gone: connecti"
    with pytest.raises(DistNetworkError, match=said):
        met.connect(SECOND)


# By what a rank tells its own job's store from another's.


def job(launcher="torchrun", port=29500, **env):
    return Job.of(info(launcher), port, env)


def test_what_is_written_is_read_and_what_another_wrote_is_no_job():
    mine = job(PBS_JOBID="7.pbs")
    assert Job.read(mine.written()) == mine
    assert mine.pid == os.getpid()
    for text in (b"", b"{}", b"[1, 2]", b'[{}, "h", "p"]', b"\xff", b"[[], 1, 2]"):
        assert Job.read(text) is None, text


RUN = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}
HET = {"SLURM_HET_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("launcher", "here", "there", "differs"),
    [
        ("torchrun", {}, {}, ""),
        # a variable may reach the first node only
        ("torchrun", {"PBS_JOBID": "7"}, {}, ""),
        ("torchrun", {"PBS_JOBID": "7"}, {"PBS_JOBID": "8"}, "PBS job 7, not 8"),
        ("torchrun", RUN, {**RUN, "TORCHELASTIC_RESTART_COUNT": "1"}, "restart 0, not 1"),
        ("slurm", {"SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "1"}, "Slurm step 0, not 1"),
        # two steps, one world: somebody's own way of starting
        ("torchrun", {"SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "1"}, ""),
        # the parts of a heterogeneous job
        ("slurm", {"SLURM_JOB_ID": "7", **HET}, {"SLURM_JOB_ID": "8", **HET}, ""),
        ("ezpz", {"EZPZ_LAUNCH_ID": "a"}, {"EZPZ_LAUNCH_ID": "b"}, "launch a, not b"),
        ("ezpz", {"EZPZ_ATTEMPT": "0"}, {"EZPZ_ATTEMPT": "1"}, "attempt 0, not 1"),
    ],
)
def test_another_job(launcher, here, there, differs):
    assert job(launcher, **here).differs(job(launcher, **there)) == differs
    assert job(port=1).differs(job(port=2)) == "port 1, not 2"


# Which port rank 0 takes, and what it says of who is in the way.

OURS = Job({"user": "1", "port": "2"}, "h", 3)


def place(*ports, addresses=("127.0.0.1",), job=OURS):
    return Place("there", addresses, ports, job, "a test")


@pytest.mark.parametrize("port", [1, 29500, 65535])
def test_candidates_are_the_same_everywhere(port):
    first, *others = candidates(port)
    assert first == port
    assert candidates(port) == (first, *others)
    assert len({first, *others}) == 8
    assert all(each in PORTS for each in others)
    assert candidates(port + 1)[1:] != tuple(others)


@pytest.mark.parametrize("local_world_size", [1, 2])
def test_a_taken_port_is_passed_over(listener, caplog, opened, local_world_size):
    port = listener("http")
    zero = info(rank=0, local_world_size=local_world_size)
    met = opened(place(port, 0), zero)
    assert met.reached == "127.0.0.1"
    assert port != met.master_port != met.server.store_port
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(RefusedError, match="connection refused"):
            connect("127.0.0.1", bound.getsockname()[1], 1.0, OURS)
        opened(place(bound.getsockname()[1], 0))
    assert "held by a process that does not listen" in caplog.text


def test_a_second_rank_0_is_an_error_that_names_the_first(opened):
    port = opened(place(0)).master_port
    with pytest.raises(SetupError) as caught:
        open_server(place(port, 0), ZERO, SECOND)
    said = str(caught.value)
    assert said.startswith(f"rank 0 of 2 is duplicate: process 3 on h holds port {port}, and")
    assert f"process {os.getpid()} on {get_hostname()}; expected one" in said


def test_no_port_is_left(listener, monkeypatch):
    monkeypatch.setattr(_rendezvous, "_PATIENCE", 30.0)  # 0.5 s are of an idle machine
    ports = listener("ssh"), listener("ssh")
    with pytest.raises(SetupError) as caught:
        open_server(place(*ports), ZERO, SECOND)
    said = str(caught.value)
    who = f"rank 0 of 2 on {get_hostname()}"
    assert said.startswith(f"{who} finds no free port for there:{ports[0]}")
    assert all(f"{port}: held by a listener that is not rank 0" in said for port in ports)
    assert "export another MASTER_PORT on every rank" in said

    def no(address, port):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(_rendezvous, "listen", no)
    with pytest.raises(SetupError, match=r"cannot listen on port 5 \(a test\): Too many open file"):
        open_server(place(5), ZERO, SECOND)


def test_on_one_node_no_one_outside_reaches_rank_0(opened):
    met = opened(place(0))
    # What is bound to every address is in the way of every other.
    for port in met.master_port, met.server.store_port:
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.2", port))
    met = opened(place(0), info(rank=0, local_world_size=1))
    for port in met.master_port, met.server.store_port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.2", port))


def test_rank_0_on_another_host_than_it_is_looked_for(caplog):
    # 192.0.2.1 is no one's (RFC 5737).
    for addresses in ("127.0.0.1", "192.0.2.1"), ("192.0.2.1",):
        assert not caplog.records
        where = place(0, addresses=addresses)
        _rendezvous._meet_at(where, info(rank=0, local_world_size=1), SECOND).server.close()
    said = f"rank 0 is on {get_hostname()}, and the other ranks look for it at there:0 (a test), "
    assert said in caplog.text


def test_rank_0_may_hold_connections_of_all_ranks(ranks):
    script = """
        import resource
        from ezpz_dist._rendezvous import raise_file_limit
        def raised(world_size):
            raise_file_limit(world_size)
            return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        assert (raised(10), raised(200)) == (600, 912)
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, 700))
        assert raised(1000) == 700
        """
    ((_, _, errors),) = ranks(1, script, check=False)
    assert "rank 0 may open 700 files, and holds up to two connections" in errors
    assert "Error" not in errors


# What is behind a port.


# Both of torch's servers: they answer by their own code.
@pytest.mark.parametrize("use_libuv", [True, False])
def test_this_jobs_rank_0_and_a_store_of_torch(use_libuv, opened):
    store = TCPStore(
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False, use_libuv=use_libuv
    )
    with pytest.raises(NotOurStoreError, match="a store of torch that no ezpz_dist opened"):
        connect("127.0.0.1", store.port, 0.2, OURS)
    met = opened(place(0))
    call, found = connect("127.0.0.1", met.master_port, 5.0, OURS)
    call.close()
    assert found.facts == OURS.facts


# What a name stands for, and which address of this host others can reach.


def test_what_a_host_stands_for_and_whose_an_address_is():
    assert _addresses.look_up("127.0.0.1") == (("127.0.0.1",), "")
    assert _addresses.look_up("::1") == (("::1",), "")
    assert _addresses.look_up("fe80::1%eth0") == (("fe80::1%eth0",), "")
    found = _addresses.resolve("localhost", TWO_NODES, "MASTER_ADDR")
    assert set(found) <= {"127.0.0.1", "::1"}
    assert all(_addresses.is_own(each) and _addresses.is_loopback(each) for each in found)
    assert not _addresses.is_own("192.0.2.1")  # RFC 5737: no one's
    assert not _addresses.is_own("2001:db8::1")


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 300, "b\u00e4h" * 99])
def test_a_name_that_does_not_resolve_is_an_error_within_2_s(name):
    start = time.monotonic()
    with pytest.raises(SetupError) as caught:
        _addresses.resolve(name, TWO_NODES, "MASTER_ADDR")
    assert time.monotonic() - start < 60  # 2 s, and a busy machine
    said = str(caught.value)
    assert said.startswith(f"rank 1 of 2 on {get_hostname()}: MASTER_ADDR is {name!r}, which does")
    assert "export MASTER_ADDR and MASTER_PORT to name another" in said


def test_a_name_server_that_answers_later_or_never(monkeypatch):
    # What a name server does cannot be arranged here: its answers are given by hand.
    answers = [socket.gaierror(socket.EAI_AGAIN, "later"), ("10.1.2.3",)]

    def ask(host):
        if not answers:
            time.sleep(4)
            return ()
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(_addresses, "_ask", ask)
    assert _addresses.resolve("h", TWO_NODES, "MASTER_ADDR") == ("10.1.2.3",)
    monkeypatch.setattr(_addresses, "_LONGEST", 0.1)
    assert _addresses.look_up("h") == ((), "the resolver has not answered in 0.1 s")


@pytest.mark.parametrize(
    ("machine", "host", "expected"),
    [
        ("aurora", "x4102c0s0b0n0", "x4102c0s0b0n0.hsn.cm.aurora.alcf.anl.gov"),
        ("aurora", "x4102c0s0b0n0.example", "x4102c0s0b0n0.hsn.cm.aurora.alcf.anl.gov"),
        ("aurora", "10.0.0.1", "10.0.0.1"),
        ("aurora", "fe80::1", "fe80::1"),
        ("perlmutter", "nid001", "nid001"),
    ],
)
def test_the_fast_network(machine, host, expected):
    assert _addresses.on_fast_network(host, {"EZPZ_MACHINE": machine}) == expected


def test_what_a_host_advertises(monkeypatch):
    assert _addresses.advertised(info(), {}) == "127.0.0.1", "on one node it needs no name"
    # This machine's own name cannot be changed for a test: another's is looked up.
    monkeypatch.setattr(_addresses, "get_hostname", lambda: "localhost")
    outward = _addresses.outward_address()
    if outward is not None:
        assert _addresses.advertised(TWO_NODES, {}) == outward
        assert _addresses.is_own(outward)
        monkeypatch.setattr(_addresses, "get_hostname", lambda: outward)
        assert _addresses.advertised(TWO_NODES, {}) == outward
    monkeypatch.setattr(_addresses, "get_hostname", lambda: "localhost")
    monkeypatch.setattr(_addresses, "outward_address", lambda: None)
    with pytest.raises(SetupError, match=r"rank 0's host localhost has no address that other no"):
        _addresses.advertised(TWO_NODES, {})


def test_gloo_is_told_an_interface_only_where_it_would_err(monkeypatch):
    monkeypatch.setattr(_addresses, "get_hostname", lambda: "localhost")
    own = _addresses.outward_address()
    outward = None if own is None else _addresses.interface_of(own)
    assert gloo_interface(TWO_NODES, "127.0.0.1", 29500, {}) == outward
    assert gloo_interface(TWO_NODES, "127.0.0.1", 29500, {"GLOO_SOCKET_IFNAME": "x"}) is None
    assert gloo_interface(info(), "127.0.0.1", 29500, {}) is None
    if own is not None:
        assert outward in {name for _, name in socket.if_nameindex()}
        assert gloo_interface(TWO_NODES, own, 29500, {}) == outward
        monkeypatch.setattr(_addresses, "get_hostname", lambda: own)
        assert gloo_interface(TWO_NODES, "127.0.0.1", 29500, {}) is None
