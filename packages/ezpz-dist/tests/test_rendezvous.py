"""How ranks meet under each launcher that can run here, and what is said when they cannot."""

import logging
import re
import shutil
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
from torch.distributed import DistNetworkError, TCPStore

from ezpz_dist import SetupError, _address, _rendezvous
from ezpz_dist._address import Job
from ezpz_dist._rendezvous import JOB_KEY, candidates, derived_port, meet, side_store
from ezpz_topo import RankInfo, get_hostname

# torch looks up the name of every address that it connects to; glibc's own wait is 5 s.
QUICK_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}

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
if sys.argv[1] == "raise" and rank == 1:
    raise ValueError("boo")
ezpz_dist.barrier()
print("done", flush=True)
"""


def launch(launcher, clean_env, script, *arguments):
    path = shutil.which(launcher[0], path=clean_env["PATH"])
    if path is None:
        pytest.skip(f"no {launcher[0]} here")
    return subprocess.Popen(
        [path, *launcher[1:], str(script), *arguments],
        env=clean_env | QUICK_NAMES, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end(process):
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


MPIEXEC = ["mpiexec", "-n", "2", sys.executable]
TORCHRUN = ["torchrun", "--nproc-per-node", "2"]


def test_bare_mpiexec_broadcasts_the_address_and_no_rank_outlives_another(clean_env, script):
    started = [launch(MPIEXEC, clean_env, script, mode) for mode in ("run", "raise", "exit")]
    run, raised, left = [end(process) for process in started]
    assert run[0] == 0, run[2]
    assert run[1].count("done") == 2
    assert "ranks by pmi, address by bound by rank 0, broadcast over MPI" in run[2]
    assert raised[0] != 0
    assert "ValueError: boo" in raised[2]
    # without it, the rank would wait in MPI_Finalize for peers that wait for it
    assert left[0] != 0


def test_torchrun(clean_env, script):
    code, out, err = end(launch(TORCHRUN, clean_env, script, "run"))
    assert code == 0, err
    assert out.count("done") == 2
    assert "ranks by torchrun, address by MASTER_ADDR and MASTER_PORT" in err


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


def test_a_rank_that_never_comes_under_bare_mpiexec(clean_env, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ABSENT)
    cases = ("1", "early"), ("0", "late")
    early, late = [launch(MPIEXEC, clean_env, script, *case) for case in cases]
    early, late = end(early), end(late)
    assert early[0] != 0
    assert "Timeout (0:00:03)!" in early[2]
    assert f"in rank 0 of 2 on {get_hostname()}: waits in MPI for the others" in early[2]
    assert late[0] != 0
    here = f"rank 1 of 2 on {get_hostname()} has waited"
    assert f"{here} 0 s in MPI for rank 0 to broadcast the address" in late[2]
    assert f"SetupError: {here} 2 s in MPI for rank 0 to broadcast the address" in late[2]


def info(launcher, rank=1, world_size=2, local_world_size=2, local_rank=0):
    return RankInfo(rank, world_size, local_rank, local_world_size, None, launcher)


SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        ({}, "MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT"),
        ({"MASTER_PORT": "29500"}, "MASTER_ADDR"),
    ],
)
def test_no_address(env, missing):
    with pytest.raises(SetupError, match=rf"rank 1 of 2 \(torchrun\) has no {missing};"):
        meet(info("torchrun"), SECOND, env)


@pytest.mark.parametrize("port", ["x", "0", "65536", "-1"])
def test_a_port_that_is_none(port):
    with pytest.raises(SetupError, match=f"MASTER_PORT='{port}'; expected a port number"):
        meet(info("torchrun"), SECOND, {"MASTER_ADDR": "h", "MASTER_PORT": port})


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}


def test_a_slurm_steps_ranks_derive_the_same_address():
    first = meet(info("slurm", rank=0, world_size=1), SECOND, STEP)
    assert first.source == "a world of one"
    zero = meet(info("slurm", rank=0, local_world_size=1), SECOND, STEP)
    one = meet(info("slurm", rank=1, local_world_size=1), SECOND, STEP)
    assert (zero.master_addr, zero.master_port) == (one.master_addr, one.master_port)
    assert zero.master_addr == "localhost"
    zero.store.set("k", "v")
    assert one.store.get("k") == b"v"
    # Were rank 0 to open another, the others could still meet the first.
    assert meet(info("slurm", rank=0, local_world_size=1), SECOND, STEP) is zero


def test_another_step_takes_another_port():
    ports = {
        meet(info("slurm", rank=0), SECOND, {**STEP, "SLURM_STEP_ID": str(step)}).master_port
        for step in range(1, 6)
    }
    assert len(ports) == 5


def test_a_slurm_port_that_is_taken_is_passed_over():
    step = {**STEP, "SLURM_STEP_ID": "99"}
    port = derived_port("7.99")
    with socket.create_server(("127.0.0.1", port)):  # and it says nothing
        zero = meet(info("slurm", rank=0), SECOND, step)
        one = meet(info("slurm", rank=1), timedelta(seconds=30), step)
    assert zero.master_port == one.master_port == candidates(port)[1]


@pytest.mark.parametrize(
    ("launcher", "env", "source"),
    [
        ("torchrun", {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "1"}, "MASTER_ADDR"),
        (
            "slurm",
            {**STEP, "SLURM_STEP_NODELIST": "no-such-host.invalid,b"},
            "the step's first host",
        ),
    ],
)
def test_a_host_that_does_not_resolve(monkeypatch, launcher, env, source):
    monkeypatch.setattr(_address, "_RETRIED", 0.1)  # test_meeting_address.py has the whole time
    said = f"rank 1 of 2 on {get_hostname()}: {source} is 'no-such-host.invalid', which does not re"
    with pytest.raises(SetupError, match=re.escape(said)):
        meet(info(launcher, local_world_size=1), timedelta(seconds=60), env)


MEET = """
    import logging, time
    from datetime import timedelta
    from ezpz_dist._rendezvous import meet, side_store
    from ezpz_topo import get_rank_info
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    info, sixty = get_rank_info(), timedelta(seconds=60)
    def leave(store):  # rank 0 last: the stores end with it
        store.set(f"{info.rank} leaves", "")
        if info.rank == 0:
            store.get("1 leaves")
"""


def test_whoever_holds_the_port_the_ranks_meet_elsewhere(ranks, listener):
    theirs = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    others = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    # As the same user's, on a port that he gave to two jobs.
    job = Job.of(info("torchrun"), others.port, {"SLURM_JOB_ID": "8"})
    others.set(JOB_KEY, job.written().decode())
    ports = {
        **{kind: listener(kind) for kind in ("resets", "closes", "http", "silent")},
        "torch": theirs.port,
        "another job": others.port,
    }
    said = ranks(
        2,
        MEET
        + f"""
    for kind, port in {ports}.items():
        env = {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "SLURM_JOB_ID": "7"}}
        start = time.monotonic()
        meeting = meet(info, sixty, env)
        meeting.store.set(f"rank {{info.rank}}", kind)
        assert meeting.store.get("rank 0") == meeting.store.get("rank 1") == kind.encode()
        side = side_store(meeting, sixty)
        assert side.get("rank 1") == kind.encode()
        print("met", kind, meeting.master_port, time.monotonic() - start)
    leave(meeting.store)
    """,
        env=QUICK_NAMES,
    )
    met = [re.findall(r"met (.+) (\d+) (\S+)", one) for one in said]
    for zero, one in zip(*met, strict=True):
        assert zero[:2] == one[:2]
        kind, port, took = one
        assert int(port) == candidates(ports[kind])[1]
        assert float(took) < 20  # torch's own client: 22 s, or for ever
        logged = f"rank 0 listens on port {port}, for 127.0.0.1:{ports[kind]} (MASTER_ADDR and MAS"
        assert logged in said[0]
        assert logged not in said[1]
    assert "process" in said[0]
    assert "(Slurm job 8, not 7)" in said[0]


def test_addresses_of_ipv6_and_names(ranks):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    said = ranks(
        2,
        MEET
        + """
    for host, port in ("[::1]", 0), ("::1", 0), ("localhost", 1):
        port += int(os.environ["MASTER_PORT"])
        meeting = meet(info, sixty, {"MASTER_ADDR": host, "MASTER_PORT": str(port)})
        meeting.store.set(f"{host} {info.rank}", host)
        assert meeting.store.get(f"{host} 0") == meeting.store.get(f"{host} 1") == host.encode()
        print(meeting.master_addr)
    leave(meeting.store)
    """,
    )
    assert said == ["::1\n::1\nlocalhost\n"] * 2


def test_rank_0_is_there_twice(ranks):
    done = ranks(
        2,
        MEET + "\n    meet(info, sixty)\n    print('met', os.getpid(), flush=True)\n"
        "    time.sleep(1)\n",
        env={"RANK": "0"},
        check=False,
    )
    (_, met, _), (_, _, error) = sorted(done, key=lambda one: one[0])
    assert sorted(code for code, _, _ in done) == [0, 1]
    first = met.split()[1]
    said = f"SetupError: rank 0 of 2 is there twice: process {first} on {get_hostname()} holds port"
    assert said in error


def test_rank_0_never_comes(monkeypatch, caplog):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    monkeypatch.setattr(_rendezvous, "SAY_AFTER", 0.1)
    start = time.monotonic()
    with pytest.raises(SetupError) as caught, caplog.at_level(logging.WARNING):
        meet(info("torchrun"), SECOND, env)
    assert 1 <= time.monotonic() - start < 120
    waits = (
        f"for rank 0's store at 127.0.0.1:{port} (MASTER_ADDR and MASTER_PORT), and finds at "
        f"127.0.0.1:{port}: connection refused; "
    )
    here = f"rank 1 of 2 on {get_hostname()} has waited"
    assert str(caught.value).startswith(f"{here} 1 s {waits}")
    assert "expected rank 0 to call setup_torch and listen there" in str(caught.value)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{here} 0 s {waits[:-2]}")
    caplog.clear()
    with pytest.raises(SetupError):
        meet(info("torchrun", rank=3, world_size=4, local_rank=1), SECOND / 5, env)
    assert not caplog.records, "one rank a node says it"


def test_torchruns_agent_holds_the_store():
    agents = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agents.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    first = [meet(info("torchrun", rank=rank), SECOND, env) for rank in (0, 1)]
    first[0].store.set("k", "old")
    assert first[1].store.get("k") == b"old"
    assert side_store(first[1], SECOND).get("k") == b"old"
    again = meet(info("torchrun", rank=0), SECOND, {**env, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert not again.store.check(["k"])
    assert again.master_port == agents.port
    # A leftover of torchrun below another launcher: rank 0 opens a store of its own.
    other = meet(info("ezpz", rank=0), SECOND, env)
    assert other.master_port == candidates(agents.port)[1]


def test_a_store_that_is_gone():
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    meeting = meet(info("torchrun"), SECOND, env)
    port = store.port
    del store
    said = (
        rf"rank 0's store at 127.0.0.1:{port} \(MASTER_ADDR and MASTER_PORT\) is gone: connection"
    )
    with pytest.raises(DistNetworkError, match=said):
        side_store(meeting, SECOND)
