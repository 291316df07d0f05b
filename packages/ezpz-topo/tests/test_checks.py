"""The checks of ``ezpz doctor``: good and bad states, with schedulers that answer as real ones."""

import os
import socket

import pytest

from ezpz_topo import CheckError, CheckResult, HostfileError, get_hostname, short_name
from ezpz_topo._checks import check_hostfile, check_network, check_scheduler, choose_interfaces

SCONTROL = """\
case "$1" in
ping) echo "Slurmctld(primary) at head is {state}"; exit {status} ;;
show) if [ "$3" = 7 ]; then cat "{folder}/job"; else
    echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; fi ;;
esac
"""
JOB = """\
JobId=7 JobName=probe
   UserId=alice(1000) GroupId=alice(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   StartTime=2026-11-21T02:00:00 EndTime=2026-11-21T02:05:00 Deadline=N/A
   Partition=all AllocNode:Sid=head:1
   NodeList=nid[001-002]
"""
IN_JOB = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "nid[001-002]", "SLURM_NODELIST": "nid[001-002]",
    "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "nid001",
}  # fmt: skip
NOTHING = {"PATH": "/nonexistent"}


@pytest.fixture
def slurm(tmp_path, command):
    """A PATH with a scontrol that knows job 7 on nid001 and nid002."""

    def make(state="UP", status=0):
        (tmp_path / "job").write_text(JOB)
        command("scontrol", SCONTROL.format(state=state, status=status, folder=tmp_path))
        return {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    return make


@pytest.fixture
def pbs(tmp_path, command):
    """A PATH with a qstat that knows job 1 on x1n0 and x1n1."""
    job = {
        "Job_Name": "probe", "job_state": "R", "queue": "workq", "exec_host": "x1n0/0*2+x1n1/0*2",
        "Resource_List.select": "2:ncpus=2:mpiprocs=2", "Resource_List.mpiprocs": "4",
    }  # fmt: skip
    lines = "".join(f"    {name} = {text}\n" for name, text in job.items())
    (tmp_path / "answer").write_text(f"Job Id: 1.pbs-0001\n{lines}")
    command("qstat", f'[ "$1" = -B ] && exit 0; cat "{tmp_path}/answer"')
    return {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "PBS_JOBID": "1.pbs-0001",
        "PBS_ENVIRONMENT": "PBS_BATCH",
    }  # fmt: skip


# What a result is.


def test_a_result_without_its_remedy_is_none():
    with pytest.raises(CheckError, match=r"warning without a remedy \('full'\); expected what"):
        CheckResult.warning("full", " ")
    with pytest.raises(CheckError, match="status is 'fine'; expected one of ok, warning, error"):
        CheckResult("fine", "all is well")
    with pytest.raises(CheckError, match="message is empty"):
        CheckResult.ok("\n")
    with pytest.raises(CheckError, match="message is 3; expected text"):
        CheckResult.ok(3)
    assert CheckResult.ok("well", free=3).details == {"free": 3}


def test_an_error_of_ours_brings_its_remedy():
    result = CheckResult.of(HostfileError("hostfile 'x' is empty; expected a host; write one"))
    assert (result.status, result.remedy) == ("error", "write one")
    assert result.message == "hostfile 'x' is empty; expected a host"
    assert result.details == {"error": "HostfileError"}
    bare = CheckResult.of(OSError(), "warning")
    assert (bare.status, bare.message) == ("warning", "OSError")
    assert bare.remedy


# The scheduler.


TWO_JOBS = {**IN_JOB, "PBS_JOBID": "1.x"}


@pytest.mark.parametrize(("scontrol", "env", "status", "message", "remedy"), [
    (None, {}, "ok", "none, and no job", ""),
    (None, {"EZPZ_MACHINE": "aurora"}, "warning",
     "aurora has PBS, and 'qstat' cannot be started", "add /opt/pbs/bin to PATH"),
    (None, TWO_JOBS, "error", "expected one job", "unset the one that is left over from"),
    # outside of a job the controller is asked
    (["UP", 0], {}, "ok", "Slurm answers; no job in this shell", ""),
    (["DOWN", 0], {}, "warning", "'Slurmctld(primary) at head is DOWN'", "nothing, if you"),
    # in one it knows that; where it is silent the variables do
    (["UP", 0], IN_JOB, "ok", "job 7 has 2 hosts: nid[001-002], ends at 2026-11-21 02:05", ""),
    (["DOWN", 1], IN_JOB, "warning",
     "job 7 of Slurm, by its variables; but 'scontrol ping' ended with", "try again later"),
    (None, IN_JOB, "warning", "cannot be started", "to PATH"),
    # a job that is over
    (["UP", 0], {**IN_JOB, "SLURM_JOB_ID": "8"}, "error",
     "'scontrol show job 8' ended with exit status 1", "Invalid job id"),
])  # fmt: skip
def test_the_scheduler(*, slurm, scontrol, env, status, message, remedy):
    result = check_scheduler(60, {**(slurm(*scontrol) if scontrol else NOTHING), **env})
    assert (result.status, message in result.message) == (status, True), result
    assert remedy in f"{result.message} {result.remedy}"
    if env == IN_JOB:
        assert result.details["hosts"] == ["nid001", "nid002"]


def test_a_controller_that_hangs_is_not_waited_for(tmp_path, command):
    command("scontrol", "exec sleep 100")
    result = check_scheduler(0.5, {"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert result.status == "warning"
    assert "'scontrol ping' gave no answer in 0.4 s" in result.message


def test_pbs_is_asked_for_its_job(pbs, tmp_path):
    (tmp_path / "nodes").write_text("x1n0.site\nx1n1.site\n")
    result = check_scheduler(60, {**pbs, "PBS_NODEFILE": str(tmp_path / "nodes")})
    assert result.status == "ok"
    assert result.message == "PBS answers; job 1.pbs-0001 has 2 hosts: x1n0.site,x1n1.site"


# The hostfile.


def test_without_a_hostfile_and_a_job_this_host_is_used(tmp_path):
    result = check_hostfile(60, NOTHING)
    assert (result.status, result.details["hosts"]) == ("ok", [get_hostname()])
    (tmp_path / "hosts").write_text("a\nb slots=2\n")
    named = check_hostfile(60, {**NOTHING, "HOSTFILE": str(tmp_path / "hosts")})
    assert named.status == "ok"
    assert "2 hosts (a, b); no job to compare with" in named.message
    absent = check_hostfile(60, {**NOTHING, "HOSTFILE": str(tmp_path / "none")})
    assert (absent.status, "none' cannot be read" in absent.message) == ("error", True)
    assert "unset the variable that names it" in absent.remedy


STALE = {**IN_JOB, "SLURM_JOB_NODELIST": "nid[003-004]", "SLURM_NODELIST": "nid[003-004]"}


@pytest.mark.parametrize(("text", "env", "answers", "status", "said"), [
    ("nid002\n", IN_JOB, True, "ok", "1 of the 2 hosts of job 7"),
    ("nid001.site.gov\nNID002\n", IN_JOB, True, "ok", "2 of the 2 hosts of job 7"),
    ("nid001\nnid003\n", IN_JOB, True, "error",
     "names nid003, which job 7 does not have: nid001, nid002 (slurm's server)"),
    ("", IN_JOB, True, "ok", "2 of the 2 hosts"),
    # variables of another job
    ("", STALE, True, "error",
     "Slurm's variables name nid003, nid004, which job 7 does not have: nid001, nid002 (slurm"),
    # where the server is silent the variables are compared with
    ("", IN_JOB, False, "ok", "its server did not tell: 'scontrol' cannot be started"),
    ("nid009\n", IN_JOB, False, "error", "(SLURM_JOB_NODELIST)"),
])  # fmt: skip
def test_a_hostfile_is_held_to_the_job(*, slurm, tmp_path, text, env, answers, status, said):
    (tmp_path / "hosts").write_text(text)
    named = {"HOSTFILE": str(tmp_path / "hosts")} if text else {}
    result = check_hostfile(60, {**(slurm() if answers else NOTHING), **env, **named})
    assert (result.status, said in result.message) == (status, True), result


def test_the_node_file_of_pbs_is_held_to_exec_host(pbs, tmp_path):
    (tmp_path / "nodes").write_text("x1n0.site\nx1n7.site\n")
    env = {**pbs, "PBS_NODEFILE": str(tmp_path / "nodes")}
    wrong = check_hostfile(60, env)
    assert wrong.status == "error"
    assert "PBS_NODEFILE name x1n7.site, which job 1.pbs-0001 does not have" in wrong.message
    (tmp_path / "nodes").write_text("x1n0.site\nx1n0.site\nx1n1.site\n")
    assert check_hostfile(60, env).status == "ok"


# The network.

LOOPBACK = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


@pytest.mark.parametrize(("form", "text", "names", "missing"), [
    ("names", "eth0,ib9", ["eth0"], ["ib9"]),
    ("prefixes", "ib,eth", ["eth0", "eth1"], []),
    ("prefixes", "=eth", [], ["eth"]),
    ("prefixes", "^=eth0,lo", ["eth1"], []),
])  # fmt: skip
def test_interfaces_are_chosen_as_each_library_does(form, text, names, missing):
    assert choose_interfaces(form, text, ["lo", "eth0", "eth1"]) == (names, missing)


EVERY = ",".join(name for _, name in socket.if_nameindex())
AURORA = {"EZPZ_MACHINE": "aurora"}


@pytest.mark.parametrize(("env", "status", "message"), [
    ({}, "ok", "nothing is set"),
    ({"GLOO_SOCKET_IFNAME": LOOPBACK}, "ok", "1 variables of the network are set"),
    *(({name: "hsn7"}, "error", f"{name}=hsn7: no interface hsn7; this host has")
      for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")),
    ({**IN_JOB, "GLOO_SOCKET_IFNAME": LOOPBACK}, "error", "loopback alone does not reach the"),
    ({"NCCL_SOCKET_IFNAME": f"^{EVERY}"}, "error", "no interface is left"),
    # what the machine's file has
    (AURORA, "ok", "ezpz-launch sets CCL_PROCESS_LAUNCHER"),
    ({**AURORA, "FI_MR_CACHE_MONITOR": "memhooks"}, "warning",
     "=memhooks, where aurora.toml has userfaultfd"),
    ({**AURORA, "FI_MR_CACHE_MONITOR": "userfaultfd"}, "ok", "for each rank"),
])  # fmt: skip
def test_variables_of_the_network(env, status, message):
    result = check_network(60, {**NOTHING, **env})
    assert result.status == status
    assert message in result.message
    set_here = {name: value for name, value in env.items() if name[:4] in ("GLOO", "NCCL", "FI_M")}
    assert result.details["variables"] == set_here


def test_a_first_host_that_cannot_be_looked_up_is_an_error(tmp_path, monkeypatch):
    asked = []

    def no_such_name(name, port):
        asked.append(name)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    # Whether a resolver answers at once is not ours to test.
    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    (tmp_path / "nodes").write_text(f"{get_hostname()}\nx1n1\n")
    env = {
        **NOTHING, "EZPZ_MACHINE": "aurora", "PBS_JOBID": "1.x", "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_NODEFILE": str(tmp_path / "nodes"),
    }  # fmt: skip
    result = check_network(60, env)
    assert result.status == "error"
    assert ".hsn.cm.aurora.alcf.anl.gov, the first host on the fast network" in result.message
    assert "Name or service not known" in result.message
    assert "MASTER_ADDR=" in result.remedy
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: asked.append(name))
    assert check_network(60, env).status == "ok"
    assert asked == 2 * [f"{short_name(get_hostname())}.hsn.cm.aurora.alcf.anl.gov"]


def test_the_environment_is_only_read():
    before = dict(os.environ)
    for check in (check_scheduler, check_hostfile, check_network):
        assert check(5).status in ("ok", "warning")
    assert dict(os.environ) == before
