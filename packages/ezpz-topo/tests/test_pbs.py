"""PBS, by what a real OpenPBS 23.06 server gave: variables, node files, qstat, qselect."""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ezpz_topo import (
    HostfileError,
    IncompleteLauncherError,
    InvalidVariableError,
    SchedulerError,
    _pbs,
    detect,
    find_schedulers,
    get_allocation,
    get_hostname,
    get_hosts,
    get_num_nodes,
    get_pbs_jobs,
    get_world_size_total,
    short_name,
)

FAKE = Path(__file__).parent / "pbs" / "fake.py"
HERE = short_name(get_hostname())
NODES = "x1n0.site.gov\nx1n0.site.gov\nx1n1.site.gov\nx1n1.site.gov\n"
STARTED = 1795227043  # UTC
QSTAT = "qstat -E -fw"

BATCH = {
    "ENVIRONMENT": "BATCH", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": "1.pbs-0001",
    "PBS_JOBNAME": "probe", "PBS_QUEUE": "workq", "PBS_NODENUM": "0", "PBS_TASKNUM": "1",
    "NCPUS": "2", "OMP_NUM_THREADS": "2", "TMPDIR": "/var/tmp", "PBS_O_HOST": "login1",
    "PBS_O_QUEUE": "workq", "PBS_O_WORKDIR": "/home/alice/run",
}  # fmt: skip
INTERACTIVE = {
    **{name: value for name, value in BATCH.items() if name != "ENVIRONMENT"},
    "PBS_ENVIRONMENT": "PBS_INTERACTIVE",
}
JOB = {
    "Job_Name": "probe", "Job_Owner": "alice@login1", "job_state": "R", "queue": "workq",
    "exec_host": "x1n0/0*2+x1n1/0*2", "exec_vnode": "(x1n0:ncpus=2)+(x1n1:ncpus=2)",
    "Resource_List": {
        "mpiprocs": "4", "ncpus": "4", "nodect": "2", "place": "scatter",
        "select": "2:ncpus=2:mpiprocs=2", "walltime": "00:05:00",
    },
    "resources_used": {"walltime": "00:00:57"}, "stime": STARTED,
    "Variable_List": {"PBS_O_HOME": "/home/alice", "LEVEL": "007"},
}  # fmt: skip


def job(**attributes):
    resources = {**JOB["Resource_List"], **attributes.pop("Resource_List", {})}
    kept = {key: value for key, value in resources.items() if value is not None}
    return {**JOB, "Resource_List": kept, **attributes}


@pytest.fixture
def pbs(tmp_path, command):
    """A PBS client on a PATH of its own; call it with the server's jobs."""

    def serve(**jobs):
        (tmp_path / "jobs").write_text(
            json.dumps({k.replace("_", "."): v for k, v in jobs.items()})
        )
        for name in ("qstat", "qselect"):
            command(name, f'exec "{sys.executable}" -SE "{FAKE}" "{tmp_path}/jobs" {name} "$@"')
        # However slow the machine: cpus_per_node() waits for two seconds by itself.
        return {
            "PATH": f"{tmp_path}:/usr/bin:/bin", "USER": "alice", "EZPZ_SCHEDULER_TIMEOUT": "60",
        }  # fmt: skip

    return serve


def asked(tmp_path):
    log = tmp_path / "jobs.log"
    return log.read_text().splitlines() if log.exists() else []


def node_file(tmp_path, text=NODES, name="1.pbs-0001"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


# In a job, by its variables and its node file alone.


@pytest.mark.parametrize("variables", [BATCH, INTERACTIVE], ids=["batch", "interactive"])
def test_job_by_its_variables_and_node_file_starts_no_command(tmp_path, pbs, variables):
    env = {**variables, **pbs(), "PBS_NODEFILE": node_file(tmp_path)}
    before = dict(env)
    found = get_allocation(env)
    assert (found.scheduler, found.job_id) == ("pbs", "1.pbs-0001")
    assert (found.name, found.queue, found.ends_at) == ("probe", "workq", None)
    assert (found.hosts, found.slots) == (("x1n0.site.gov", "x1n1.site.gov"), (2, 2))
    assert found.sources == {
        "scheduler": "PBS_JOBID", "job_id": "PBS_JOBID", "name": "PBS_JOBNAME",
        "queue": "PBS_QUEUE", "hosts": "PBS_NODEFILE", "slots": "PBS_NODEFILE",
        "node_name": "uname",
    }  # fmt: skip
    assert asked(tmp_path) == []
    assert env == before


@pytest.mark.parametrize(("told", "cpus"), [
    # As OpenPBS 23.06 gave them: NCPUS is a chunk's, or its ompthreads.
    (((1,), "3", ""), (3, 3)),  # 1:ncpus=3
    (((1,), "1", ""), (1, 1)),  # 1:ncpus=1, also on a node of many
    (((2, 2), "4", "{}/0*4+x1n1/0*4"), (4, 4)),  # 2:ncpus=4:mpiprocs=2
    (((2,), "1", "{}/0*4"), (2, 2)),  # 1:ncpus=4:mpiprocs=2:ompthreads=1
    (((2,), "2", "{}/0*2+{}/1*2"), (4, 4)),  # 2:ncpus=2, packed
    (((3, 2), "3", "{}/0*3+x1n1/0*2"), (3, 2)),  # ncpus=3:mpiprocs=3+ncpus=2:mpiprocs=2
    (((2,), "2", None), (2, 2)),  # the server does not answer
])  # fmt: skip
def test_the_chunks_cpus_are_all_that_the_job_has(tmp_path, monkeypatch, pbs, told, cpus):
    lines, ncpus, exec_host = told
    for asked_for in ("cpu_count_with_source", "cpus_per_node_with_source"):
        monkeypatch.setattr(f"ezpz_topo._topology.{asked_for}", lambda *_: (64, "the node"))
    served = {"1_pbs-0001": job(exec_host=exec_host.format(HERE, HERE))} if exec_host else {}
    hosts = (f"{HERE}.site.gov", "x1n1")[: len(lines)]
    text = "".join(f"{host}\n" * n for host, n in zip(hosts, lines, strict=True))
    env = {**BATCH, **pbs(**served), "NCPUS": ncpus, "PBS_NODEFILE": node_file(tmp_path, text)}
    found = detect(env)
    assert (found.cpu_count, found.cpus_per_node) == cpus
    # A rank asks nobody.
    assert bool(asked(tmp_path)) == (lines != (1,))
    ranks = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "4"}
    count = len(asked(tmp_path))
    detect({**env, **ranks})
    assert len(asked(tmp_path)) == count


@pytest.mark.parametrize(("text", "hosts", "slots", "on_node"), [
    ("x1n0.site.gov\nx1n0.site.gov\n", ("x1n0.site.gov",), (2,), False),  # packed
    ("b.x\r\na.x\r\n\r\nb.x", ("b.x", "a.x"), (2, 1), False),  # not grouped, no last line end
    (f"x1.gov\n{HERE.upper()}.other\n", ("x1.gov", f"{HERE.upper()}.other"), (1, 1), True),
])  # fmt: skip
def test_node_files(tmp_path, text, hosts, slots, on_node):
    # A job array's file has brackets in its name, as its id.
    path = node_file(tmp_path, text, name="40[1].pbs-0001")
    found = get_allocation({**BATCH, "PBS_JOBID": "40[1].pbs-0001", "PBS_NODEFILE": path})
    assert (found.job_id, found.hosts, found.slots) == ("40[1].pbs-0001", hosts, slots)
    assert found.on_node == on_node
    # Variables may be exported into another host's shell.
    assert on_node or any(HERE in note and "40[1].pbs-0001" in note for note in found.notes)


def test_a_node_file_that_is_none_is_an_error_and_asks_nobody(tmp_path, pbs):
    path = node_file(tmp_path, "a,b\n")
    env = {**BATCH, **pbs(**{"1_pbs-0001": JOB}), "PBS_NODEFILE": path}
    with pytest.raises(HostfileError, match="line 1") as caught:
        get_allocation(env)
    assert path in str(caught.value)
    assert "unset PBS_NODEFILE" in str(caught.value)
    assert asked(tmp_path) == []


# In a job, where the node file cannot be read: qstat.


@pytest.mark.parametrize("variables", [{}, {"PBS_NODEFILE": ""}, {"PBS_NODEFILE": "/nonexistent"}])
def test_without_node_file_qstat_is_asked_once(tmp_path, pbs, variables):
    env = {**pbs(**{"1_pbs-0001": JOB}), "PBS_JOBID": "1.pbs-0001", **variables}
    found = get_allocation(env)
    # exec_host has short names where the node file has full ones; /0*2 are CPUs.
    assert (found.hosts, found.slots) == (("x1n0", "x1n1"), (2, 2))
    assert (found.name, found.queue) == ("probe", "workq")
    assert found.ends_at == datetime(2026, 11, 21, 2, 15, 43, tzinfo=UTC)
    assert found.sources["job_id"] == "PBS_JOBID"
    assert found.sources["hosts"] == found.sources["slots"] == found.sources["ends_at"] == QSTAT
    assert "PBS_NODEFILE" in found.notes[0]
    assert asked(tmp_path) == ["qstat -E -fw 1.pbs-0001"]


@pytest.mark.parametrize(("key", "job_id"), [("40[1]_pbs-0001", "40[1].pbs-0001"), ("1", "1")])
def test_ids_of_arrays_and_without_their_servers_name(pbs, key, job_id):
    found = get_allocation({**BATCH, **pbs(**{key: job(queue="other")}), "PBS_JOBID": job_id})
    assert (found.job_id, found.hosts) == (job_id, ("x1n0", "x1n1"))
    # Variables outrank qstat.
    assert (found.queue, found.sources["queue"]) == ("workq", "PBS_QUEUE")


@pytest.mark.parametrize(("exec_host", "select", "mpiprocs", "slots"), [
    ("x1n0/0+x1n0/1", "2:ncpus=1", "2", (2,)),
    ("x1n0/0+x1n0/1", "2:ncpus=1", None, (2,)),
    ("x1n0/0*2+x1n1/0*2", "2:ncpus=2", None, (1, 1)),
    ("x1n0/0*8+x1n1/0*8", "ncpus=8:mpiprocs=4+ncpus=8:mpiprocs=2", "6", (4, 2)),
    ("x1n0/0*8+x1n1/0*8", "1:ncpus=8:mpiprocs=4+1:ncpus=8", "5", (4, 1)),
    # What does not add up is not known.
    ("x1n0/0*2+x1n1/0*2", "2:ncpus=2:mpiprocs=2", "8", None),
    ("x1n0/0*2+x1n1/0*2", "1:ncpus=2", None, None),
    ("x1n0/0*2+x1n1/0*2", "999999:ncpus=2:mpiprocs=2", None, None),
    ("x1n0/0*2+x1n1/0*2", "2:ncpus=0", None, None),
    ("x1n0/0*2+x1n1/0*2", "2:ncpus=2:mpiprocs=two", None, None),
    ("x1n0/0*2+x1n1/0*2", None, "2", None),
    ("x1n0/0*2+x1n1/0*2", "x1n0+x1n1", None, None),
])  # fmt: skip
def test_slots_by_select_and_mpiprocs(pbs, exec_host, select, mpiprocs, slots):
    told = job(exec_host=exec_host, Resource_List={"select": select, "mpiprocs": mpiprocs})
    found = get_allocation({**pbs(**{"1_pbs-0001": told}), "PBS_JOBID": "1.pbs-0001"})
    assert found.slots == slots
    assert ("slots" in found.sources) == (slots is not None)


WAITS = {key: JOB[key] for key in ("Job_Name", "Job_Owner", "queue", "Resource_List")}


@pytest.mark.parametrize(("told", "message"), [
    *((job(exec_host=text), "exec_host") for text in ("x1n0", "x1n0/0+", "x1n0/a", "[x]/0")),
    ({**WAITS, "job_state": "Q"}, "no exec_host and is in state 'Q'"),
    (job(job_state="F"), "1.pbs-0001 has finished.*unset PBS_JOBID"),
    (None, "PBS_NODEFILE.*1.pbs-0001 is unknown.*unset"),
    ("exit 153", "unset PBS_JOBID"),
    ("exit 35", "unset PBS_JOBID"),
    ("exit 127", "PBS_NODEFILE.*exit status 127"),
    ("echo '{}'", "printed '{}.n'; expected 'Job Id: "),
    *((f"echo '{text}'", "not in the answer") for text in ("", "Job Id: 2.pbs-0001")),
])  # fmt: skip
def test_what_qstat_may_say_instead(pbs, command, told, message):
    env = pbs(**({"1_pbs-0001": told} if isinstance(told, dict) else {}))
    if isinstance(told, str):
        command("qstat", told)
    with pytest.raises(SchedulerError, match=message):
        get_allocation({**env, "PBS_JOBID": "1.pbs-0001"})


BALANCE = "Remaining balance: 497,218 hours"


def test_lines_of_a_site_beside_jobs(tmp_path, pbs, command):
    env = pbs(**{"1_pbs-0001": JOB})
    for name in ("qstat", "qselect"):
        real = (tmp_path / name).rename(tmp_path / f"real-{name}")
        command(name, f'echo "{BALANCE}"; {real} "$@"; status=$?; echo "{BALANCE}"; exit $status')
    assert get_allocation({**env, "PBS_JOBID": "1.pbs-0001"}).hosts == ("x1n0", "x1n1")
    assert _pbs.job_of_this_host(env, "x1n0").job_id == "1.pbs-0001"
    with pytest.raises(SchedulerError, match=r"8\.pbs-0001 is unknown to the server"):
        get_allocation({**env, "PBS_JOBID": "8.pbs-0001"})


@pytest.mark.parametrize("bad", ["-x", "1 2", "all", "1\n2"])
def test_what_is_no_name_is_never_an_argument(tmp_path, pbs, bad):
    with pytest.raises(InvalidVariableError, match="job id"):
        get_allocation({**pbs(), "PBS_JOBID": bad})
    if bad != "all":
        with pytest.raises(InvalidVariableError, match="USER="):
            _pbs.job_of_this_host({**pbs(), "USER": bad}, "x1n0")
    assert asked(tmp_path) == []


@pytest.mark.parametrize("line", ["PBS_EXEC={}", 'PBS_EXEC="{}"'])
def test_qstat_and_qselect_are_looked_for_where_pbss_own_file_says(tmp_path, pbs, line):
    pbs(**{"1_pbs-0001": JOB})
    (tmp_path / "opt" / "bin").mkdir(parents=True)
    for name in ("qstat", "qselect"):
        (tmp_path / name).rename(tmp_path / "opt" / "bin" / name)
    conf = tmp_path / "pbs.conf"
    conf.write_text(f"PBS_SERVER=pbs-0001\n{line.format(tmp_path / 'opt')}\n")
    env = {"PATH": "/usr/bin:/bin", "USER": "alice", "PBS_CONF_FILE": str(conf)}
    assert _pbs.job_of_this_host(env, "x1n1").job_id == "1.pbs-0001"
    assert get_allocation({**BATCH, **env}).hosts == ("x1n0", "x1n1")
    assert get_allocation({**BATCH, "PATH": "", "PBS_EXEC": f"{tmp_path}/opt"}).num_nodes == 2
    # A login shell may have reset PATH.
    with pytest.raises(SchedulerError, match=r"'/nonexistent'.*'qstat'.*/opt/pbs/bin"):
        get_allocation({**BATCH, "PATH": "", "PBS_CONF_FILE": "/", "PBS_NODEFILE": "/nonexistent"})


# The end of the walltime.


@pytest.mark.parametrize("zone", [None, "America/Chicago", "JST-9"])
def test_end_time_is_the_same_in_every_time_zone(pbs, zone):
    env = pbs(**{"1_pbs-0001": JOB})
    env = env if zone is None else {**env, "TZ": zone}
    assert _pbs.end_time("1.pbs-0001", env) == datetime(2026, 11, 21, 2, 15, 43, tzinfo=UTC)


@pytest.mark.parametrize(
    ("walltime", "seconds"),
    [("300", 300), ("05:00", 300), ("72:00:00", 259_200), ("01:00:00:01", 86_401),
     ("00:00:30.5", 30), (None, None)],
)  # fmt: skip
def test_forms_of_walltime(pbs, walltime, seconds):
    env = pbs(**{"1_pbs-0001": job(Resource_List={"walltime": walltime})})
    end = _pbs.end_time("1.pbs-0001", env)
    assert (end and end.timestamp()) == (seconds and STARTED + seconds)


@pytest.mark.parametrize("stime", ["Sat Nov 31 02:10:43 2026", "1795227043"])
def test_a_start_that_does_not_parse(pbs, stime):
    with pytest.raises(SchedulerError, match="stime"):
        _pbs.end_time("1.pbs-0001", pbs(**{"1_pbs-0001": job(stime=stime)}))


@pytest.mark.parametrize("walltime", ["soon", "1:2:3:4:5", "-1", "999999999:00:00:00"])
def test_a_walltime_that_does_not_parse_is_no_reason_to_lose_the_hosts(pbs, walltime):
    env = pbs(**{"1_pbs-0001": job(Resource_List={"walltime": walltime})})
    with pytest.raises(SchedulerError, match="walltime"):
        _pbs.end_time("1.pbs-0001", env)
    found = get_allocation({**env, "PBS_JOBID": "1.pbs-0001"})
    assert (found.num_nodes, found.ends_at) == (2, None)


# A shell on a job's node, without PBS's variables.


def test_a_shell_on_a_jobs_node(tmp_path, pbs):
    env = pbs(**{
        "1_pbs-0001": JOB,
        "2_pbs-0001": job(exec_host="x1n2/0*2+x1n3/0*2", Job_Name="other"),
        "3_pbs-0001": job(exec_host="x1n4/0*2+x1n3/1*2", Job_Owner="bob@login1"),
        "4_pbs-0001": job(job_state="Q"),
    })  # fmt: skip
    found = _pbs.job_of_this_host(env, "X1N3.hsn.site.gov")
    assert (found.job_id, found.name, found.hosts) == ("2.pbs-0001", "other", ("x1n2", "x1n3"))
    assert found.slots == (2, 2)
    assert found.on_node
    assert found.ends_at == datetime(2026, 11, 21, 2, 15, 43, tzinfo=UTC)
    assert found.sources["hosts"] == f"qselect, {QSTAT}"
    assert asked(tmp_path) == ["qselect -T -u alice -s R", "qstat -E -fw 1.pbs-0001 2.pbs-0001"]


@pytest.mark.parametrize(("jobs", "host", "found"), [
    ({"40[1]_pbs-0001": JOB}, "x1n0", "40[1].pbs-0001"),
    ({}, "x1n0", None),
    ({"1_pbs-0001": JOB}, "login1", None),
    ({"1_pbs-0001": JOB}, "x1n10", None),  # x1n1 is no part of it
])  # fmt: skip
def test_jobs_of_a_host(tmp_path, pbs, jobs, host, found):
    assert getattr(_pbs.job_of_this_host(pbs(**jobs), host), "job_id", None) == found
    assert asked(tmp_path)[0] == "qselect -T -u alice -s R"


def test_a_qselect_of_old_news_that_fails_or_is_not_there(tmp_path, pbs, command):
    env = pbs(**{"1_pbs-0001": JOB})
    command("qselect", "echo 1.pbs-0001; echo 8.pbs-0001")
    assert _pbs.job_of_this_host(env, "x1n0").job_id == "1.pbs-0001"
    command("qselect", "exit 111")
    with pytest.raises(SchedulerError, match="exit status 111"):
        _pbs.job_of_this_host(env, "x1n0")
    (tmp_path / "qselect").unlink()
    assert _pbs.job_of_this_host(env, "x1n0") is None


def test_two_jobs_on_this_host_are_named(pbs):
    env = pbs(**{"1_pbs-0001": JOB, "2_pbs-0001": JOB})
    with pytest.raises(
        SchedulerError, match=r"1.pbs-0001, 2.pbs-0001.*export PBS_JOBID=1.pbs-0001"
    ):
        _pbs.job_of_this_host(env, "x1n0")


def test_user_unset_is_the_users_own_name(tmp_path, pbs):
    import pwd

    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        pytest.skip("this user has no name")
    env = pbs()
    del env["USER"]
    assert _pbs.job_of_this_host(env, "x1n0") is None
    assert asked(tmp_path) == [f"qselect -T -u {name} -s R"]


# A node without the job's node file.

RANK = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def test_one_of_many_ranks_there_starts_no_command(tmp_path, pbs):
    env = {**BATCH, **pbs(**{"1_pbs-0001": JOB}), **RANK, "PBS_NODEFILE": f"{tmp_path}/nowhere"}
    for count in (get_num_nodes, get_world_size_total):
        with pytest.raises(IncompleteLauncherError, match="to be told the number of nodes"):
            count(env)
    topology = detect(env)
    assert (topology.rank.rank, topology.allocation.hosts) == (5, ())
    rows = {name: (value, source) for name, value, source in topology.explain()}
    assert rows["hosts"][0] is None
    assert "cannot be read here" in rows["hosts"][1]
    with pytest.raises(SchedulerError, match="set PBS_NODEFILE to a copy"):
        get_hosts(env=env)
    assert asked(tmp_path) == []


def test_a_hostfile_of_the_users_does_not_win_there(tmp_path, pbs):
    (tmp_path / "stale").write_text("stale1\nstale2\n")
    env = {**BATCH, **pbs(**{"1_pbs-0001": JOB}), "PBS_NODEFILE": f"{tmp_path}/nowhere",
           "HOSTFILE": f"{tmp_path}/stale"}  # fmt: skip
    assert [entry.host for entry in get_hosts(env=env).entries] == ["x1n0", "x1n1"]


# Jobs as they are listed.

TOLD = """\
Job Id: 6.pbs-0001
    Job_Name = 007
    Job_Owner = alice@pbs-0001
    job_state = R
    Resource_List.nodect = 2
    Resource_List.walltime = 01:00:05
    stime = Sat Nov 21 02:10:43 2026
    estimated.start_time = Sat Nov 21 02:10:43 2026
    Variable_List = PBS_O_HOME=/home/alice,X=1
    job_state = F
    comment = Job run at Tue Nov 24 at 15:33 on (x1n0:ncpus=2)

Job Id: 8[1].pbs-0001
    Job_Name = a = b
    qtime = yesterday
"""  # as OpenPBS 23.06 prints, but for the last time; the second job_state is in a variable


def test_jobs_that_are_listed(tmp_path, command):
    command("qstat", f"cat <<'END'\n{TOLD}END\necho \"$TZ $*\" >>{tmp_path}/asked; exit 153")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    told = get_pbs_jobs(["6.pbs-0001", "8[1].pbs-0001"], env)
    start = datetime(2026, 11, 21, 2, 10, 43, tzinfo=UTC).timestamp()
    assert told["6.pbs-0001"] == {
        "Job_Name": "007", "Job_Owner": "alice@pbs-0001", "job_state": "R",
        "Resource_List": {"nodect": "2", "walltime": 3605.0}, "stime": start,
        "estimated": {"start_time": start}, "Variable_List": "PBS_O_HOME=/home/alice,X=1",
        "comment": "Job run at Tue Nov 24 at 15:33 on (x1n0:ncpus=2)",
    }  # fmt: skip
    assert told["8[1].pbs-0001"] == {"Job_Name": "a = b", "qtime": "yesterday"}
    assert get_pbs_jobs([], env) == {}  # not all that there are
    assert (tmp_path / "asked").read_text() == "UTC0 -E -fw -x 6.pbs-0001 8[1].pbs-0001\n"
    with pytest.raises(InvalidVariableError, match="PBS job id '6;rm'"):
        get_pbs_jobs(["6;rm"], env)


def test_whose_commands_are_here(tmp_path, command):
    env = {"PATH": str(tmp_path), "PBS_EXEC": str(tmp_path / "pbs")}
    assert find_schedulers(env) == ()
    command("squeue", "exit 1")
    (tmp_path / "pbs" / "bin").mkdir(parents=True)
    command("pbs/bin/qselect", "exit 1")
    assert find_schedulers(env) == ("slurm", "pbs")
