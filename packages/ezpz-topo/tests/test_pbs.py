"""PBS, by what a real OpenPBS 23.06 server gave: variables, node files, qstat, qselect."""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ezpz_topo import _pbs, detect, get_hosts, get_num_nodes, get_world_size_total
from ezpz_topo._errors import (
    HostfileError,
    IncompleteLauncherError,
    InvalidVariableError,
    SchedulerError,
)
from ezpz_topo._nodelist import get_hostname, short_name

FAKE = Path(__file__).parent / "pbs" / "fake.py"
HERE = short_name(get_hostname())
NODES = "x1n0.site.gov\nx1n0.site.gov\nx1n1.site.gov\nx1n1.site.gov\n"
STARTED = 1795227043  # Sat Nov 21 02:10:43 2026, UTC
QSTAT = "qstat -f -F json"

BATCH = {
    "ENVIRONMENT": "BATCH", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": "1.pbs-0001",
    "PBS_JOBNAME": "probe", "PBS_QUEUE": "workq", "PBS_NODENUM": "0", "PBS_TASKNUM": "1",
    "PBS_MOMPORT": "15003", "NCPUS": "2", "OMP_NUM_THREADS": "2", "TMPDIR": "/var/tmp",
    "PBS_JOBCOOKIE": "0123456789ABCDEF", "PBS_JOBDIR": "/home/alice", "PBS_O_HOME": "/home/alice",
    "PBS_O_HOST": "login1", "PBS_O_LANG": "C", "PBS_O_LOGNAME": "alice", "PBS_O_PATH": "/usr/bin",
    "PBS_O_QUEUE": "workq", "PBS_O_SHELL": "/bin/bash", "PBS_O_SYSTEM": "Linux",
    "PBS_O_WORKDIR": "/home/alice/run",
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
def pbs(tmp_path):
    """A PBS client on a PATH of its own; call it with the server's jobs."""

    def serve(**jobs):
        (tmp_path / "jobs").write_text(
            json.dumps({k.replace("_", "."): v for k, v in jobs.items()})
        )
        for name in ("qstat", "qselect"):
            script(
                tmp_path,
                name,
                f'exec "{sys.executable}" -SE "{FAKE}" "{tmp_path}/jobs" {name} "$@"',
            )
        return {"PATH": f"{tmp_path}:/usr/bin:/bin", "USER": "alice"}

    return serve


def script(tmp_path, name, body):
    (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
    (tmp_path / name).chmod(0o755)


def asked(tmp_path):
    log = tmp_path / "jobs.log"
    return log.read_text().splitlines() if log.exists() else []


def node_file(tmp_path, text=NODES, name="1.pbs-0001"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


# In a job, by its variables and its node file alone.


@pytest.mark.parametrize("variables", [BATCH, INTERACTIVE], ids=["batch", "interactive"])
def test_job_by_its_variables_and_node_file_starts_no_command(tmp_path, pbs, variables):
    env = {**variables, **pbs(), "PBS_NODEFILE": node_file(tmp_path)}
    before = dict(env)
    found = _pbs.allocation(env)
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


@pytest.mark.parametrize(
    ("told", "cpus"),
    [
        # As OpenPBS 23.06 gave them: NCPUS is a chunk's, or its ompthreads.
        (((1,), "3", ""), (3, 3)),  # 1:ncpus=3
        (((1,), "1", ""), (1, 1)),  # 1:ncpus=1, also on a node of many
        (((2, 2), "4", "{}/0*4+x1n1/0*4"), (4, 4)),  # 2:ncpus=4:mpiprocs=2
        (((2,), "1", "{}/0*4"), (2, 2)),  # 1:ncpus=4:mpiprocs=2:ompthreads=1
        (((2,), "2", "{}/0*2+{}/1*2"), (4, 4)),  # 2:ncpus=2, packed
        (((3, 2), "3", "{}/0*3+x1n1/0*2"), (3, 2)),  # ncpus=3:mpiprocs=3+ncpus=2:mpiprocs=2
        (((2,), "2", None), (2, 2)),  # the server does not answer
    ],
)
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


def test_array_job_has_brackets_in_its_id_and_its_node_files_name(tmp_path):
    env = {
        **BATCH, "PBS_JOBID": "40[1].pbs-0001", "PBS_ARRAY_INDEX": "1",
        "PBS_ARRAY_ID": "40[].pbs-0001", "PBS_NODEFILE": node_file(tmp_path, name="40[1].pbs-0001"),
    }  # fmt: skip
    found = _pbs.allocation(env)
    assert (found.job_id, found.num_nodes) == ("40[1].pbs-0001", 2)


def test_two_chunks_packed_on_one_host_are_one_host_with_two_slots(tmp_path):
    path = node_file(tmp_path, "x1n0.site.gov\nx1n0.site.gov\n")
    found = _pbs.allocation({**BATCH, "PBS_NODEFILE": path})
    assert (found.hosts, found.slots) == (("x1n0.site.gov",), (2,))


def test_slots_that_are_not_grouped_and_a_last_line_without_end(tmp_path):
    path = node_file(tmp_path, "b.x\r\na.x\r\n\r\nb.x")
    found = _pbs.allocation({**BATCH, "PBS_NODEFILE": path})
    assert (found.hosts, found.slots) == (("b.x", "a.x"), (2, 1))


def test_this_host_among_the_nodes_by_its_short_name(tmp_path):
    path = node_file(tmp_path, f"x1n0.site.gov\n{HERE.upper()}.other.domain\n")
    found = _pbs.allocation({**BATCH, "PBS_NODEFILE": path})
    assert found.on_node
    assert found.notes == ()


def test_variables_exported_into_another_hosts_shell(tmp_path):
    found = _pbs.allocation({**BATCH, "PBS_NODEFILE": node_file(tmp_path)})
    assert not found.on_node
    assert any(HERE in note and "1.pbs-0001" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "names no host"),
        ("\n \n", "names no host"),
        ("a.x\n-b\n", "line 2"),
        ("a,b\n", "line 1"),
        (b"a.x\n\x7fELF\x02\x01\x00\xff\xfe", "cannot be read"),
        (b"\x00" * 100_000, "NUL bytes"),
        ("x" * 300, "line 1"),
    ],
)
def test_a_node_file_that_is_none_is_an_error_and_asks_nobody(tmp_path, pbs, text, what):
    path = node_file(tmp_path, text)
    env = {**BATCH, **pbs(**{"1_pbs-0001": JOB}), "PBS_NODEFILE": path}
    with pytest.raises(HostfileError, match=what) as caught:
        _pbs.allocation(env)
    assert path in str(caught.value)
    assert "unset PBS_NODEFILE" in str(caught.value)
    assert asked(tmp_path) == []


def test_a_node_file_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(HostfileError, match=r"regular file|Is a directory"):
            _pbs.allocation({**BATCH, "PBS_NODEFILE": str(path)})


# In a job, where the node file cannot be read: qstat.


@pytest.mark.parametrize("variables", [{}, {"PBS_NODEFILE": ""}, {"PBS_NODEFILE": "/nonexistent"}])
def test_without_node_file_qstat_is_asked_once(tmp_path, pbs, variables):
    env = {**pbs(**{"1_pbs-0001": JOB}), "PBS_JOBID": "1.pbs-0001", **variables}
    found = _pbs.allocation(env)
    # exec_host has short names where the node file has full ones; /0*2 are CPUs.
    assert (found.hosts, found.slots) == (("x1n0", "x1n1"), (2, 2))
    assert (found.name, found.queue) == ("probe", "workq")
    assert found.ends_at == datetime(2026, 11, 21, 2, 15, 43, tzinfo=UTC)
    assert found.sources["job_id"] == "PBS_JOBID"
    assert found.sources["hosts"] == found.sources["slots"] == found.sources["ends_at"] == QSTAT
    assert "PBS_NODEFILE" in found.notes[0]
    assert asked(tmp_path) == ["qstat -f -F json 1.pbs-0001"]


def test_variables_outrank_qstat_for_name_and_queue(pbs):
    env = {**BATCH, **pbs(**{"1_pbs-0001": job(Job_Name="007", queue="other")})}
    found = _pbs.allocation(env)
    assert (found.name, found.queue) == ("probe", "workq")
    assert (found.sources["name"], found.sources["queue"]) == ("PBS_JOBNAME", "PBS_QUEUE")


def test_array_job_by_qstat(pbs):
    env = {**pbs(**{"40[1]_pbs-0001": JOB}), "PBS_JOBID": "40[1].pbs-0001"}
    assert _pbs.allocation(env).hosts == ("x1n0", "x1n1")


def test_an_id_without_its_servers_name(pbs):
    assert _pbs.allocation({**pbs(**{"1": JOB}), "PBS_JOBID": "1"}).job_id == "1"


@pytest.mark.parametrize(
    ("name", "told"), [("007", "7"), ("7", "7"), ("1e5", "1e5"), ("1e5x", "1e5x")]
)
def test_a_name_that_looks_like_a_number_is_still_text(pbs, name, told):
    env = {**pbs(**{"1_pbs-0001": job(Job_Name=name)}), "PBS_JOBID": "1.pbs-0001"}
    assert _pbs.allocation(env).name == told


@pytest.mark.parametrize(
    ("exec_host", "select", "mpiprocs", "slots"),
    [
        ("x1n0/0+x1n0/1", "2:ncpus=1", "2", (2,)),
        ("x1n0/0+x1n0/1", "2:ncpus=1", None, (2,)),
        ("x1n0/0*2+x1n1/0*2", "2:ncpus=2", None, (1, 1)),
        ("x1n0/0*8+x1n1/0*8", "ncpus=8:mpiprocs=4+ncpus=8:mpiprocs=2", "6", (4, 2)),
        ("x1n0/0*8+x1n1/0*8", "1:ncpus=8:mpiprocs=4+1:ncpus=8", "5", (4, 1)),
        # What does not add up is not known.
        ("x1n0/0*2+x1n1/0*2", "2:ncpus=2:mpiprocs=2", "8", None),
        ("x1n0/0*2+x1n1/0*2", "3:ncpus=2:mpiprocs=2", None, None),
        ("x1n0/0*2+x1n1/0*2", "1:ncpus=2", None, None),
        ("x1n0/0*2+x1n1/0*2", "999999:ncpus=2:mpiprocs=2", None, None),
        ("x1n0/0*2+x1n1/0*2", "2:ncpus=0", None, None),
        ("x1n0/0*2+x1n1/0*2", "2:ncpus=2:mpiprocs=two", None, None),
        ("x1n0/0*2+x1n1/0*2", None, "2", None),
        ("x1n0/0*2+x1n1/0*2", "x1n0+x1n1", None, None),
    ],
)
def test_slots_by_select_and_mpiprocs(pbs, exec_host, select, mpiprocs, slots):
    told = job(exec_host=exec_host, Resource_List={"select": select, "mpiprocs": mpiprocs})
    found = _pbs.allocation({**pbs(**{"1_pbs-0001": told}), "PBS_JOBID": "1.pbs-0001"})
    assert found.slots == slots
    assert ("slots" in found.sources) == (slots is not None)


@pytest.mark.parametrize("exec_host", ["x1n0", "x1n0/0+", "x1n0/0*2 x1n1/0*2", "x1n0/a", "[x]/0"])
def test_an_exec_host_that_does_not_parse(pbs, exec_host):
    env = {**pbs(**{"1_pbs-0001": job(exec_host=exec_host)}), "PBS_JOBID": "1.pbs-0001"}
    with pytest.raises(SchedulerError, match="exec_host"):
        _pbs.allocation(env)


def test_a_job_that_waits_has_no_hosts(pbs):
    waits = {key: JOB[key] for key in ("Job_Name", "Job_Owner", "queue", "Resource_List")}
    env = {**pbs(**{"1_pbs-0001": {**waits, "job_state": "Q"}}), "PBS_JOBID": "1.pbs-0001"}
    with pytest.raises(SchedulerError, match=r"no exec_host and is in state 'Q'"):
        _pbs.allocation(env)
    assert _pbs.end_time("1.pbs-0001", env) is None


def test_an_unknown_job_is_exit_153(tmp_path, pbs):
    with pytest.raises(SchedulerError, match=r"PBS_NODEFILE.*9.pbs-0001 is unknown.*unset"):
        _pbs.allocation({**pbs(), "PBS_JOBID": "9.pbs-0001"})
    assert len(asked(tmp_path)) == 1


def test_a_finished_job_is_exit_35(tmp_path, pbs):
    env = {**pbs(**{"1_pbs-0001": job(job_state="F")}), "PBS_JOBID": "1.pbs-0001"}
    with pytest.raises(SchedulerError, match=r"1.pbs-0001 has finished.*unset PBS_JOBID"):
        _pbs.allocation(env)
    with pytest.raises(SchedulerError, match="has finished"):
        _pbs.end_time("1.pbs-0001", env)
    assert len(asked(tmp_path)) == 2


@pytest.mark.parametrize("status", [153, 35])
def test_an_exit_status_without_any_json(tmp_path, pbs, status):
    env = {**pbs(), "PBS_JOBID": "1.pbs-0001"}
    script(tmp_path, "qstat", f"exit {status}")
    with pytest.raises(SchedulerError, match="unset PBS_JOBID"):
        _pbs.allocation(env)


def test_a_login_shell_that_reset_path_has_no_qstat(tmp_path):
    env = {**BATCH, "PATH": str(tmp_path), "PBS_NODEFILE": "/nonexistent"}
    with pytest.raises(SchedulerError, match=r"'/nonexistent'.*'qstat'.*/opt/pbs/bin"):
        _pbs.allocation(env)


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
    assert _pbs.allocation({**BATCH, **env}).hosts == ("x1n0", "x1n1")
    assert _pbs.allocation({**BATCH, "PATH": "", "PBS_EXEC": f"{tmp_path}/opt"}).num_nodes == 2


def test_a_qstat_that_exits_127(tmp_path, pbs):
    env = {**BATCH, **pbs()}
    script(tmp_path, "qstat", "echo qstat.bin: not found >&2; exit 127")
    with pytest.raises(SchedulerError, match=r"127 \(1 attempt\).*not found"):
        _pbs.allocation(env)


def test_a_server_that_is_down(tmp_path, pbs):
    env = {**BATCH, **pbs()}
    script(tmp_path, "qstat", "echo qstat: cannot connect to server pbs-0001 >&2; exit 111")
    with pytest.raises(SchedulerError, match=r"exit status 111 \(2 attempts\).*cannot connect"):
        _pbs.allocation(env)


def test_a_qstat_that_hangs(tmp_path, pbs):
    env = {**BATCH, **pbs(), "EZPZ_SCHEDULER_TIMEOUT": "0.2"}
    script(tmp_path, "qstat", "exec sleep 600")
    with pytest.raises(SchedulerError, match=r"PBS_NODEFILE.*no answer in 0.2 s"):
        _pbs.allocation(env)


@pytest.mark.parametrize("bad", ["-x", "1 2", "", "all", "1;rm", "1\n2", "--version"])
def test_a_job_id_that_is_none_is_never_an_argument(tmp_path, pbs, bad):
    with pytest.raises(InvalidVariableError, match="job id"):
        _pbs.allocation({**pbs(), "PBS_JOBID": bad})
    assert asked(tmp_path) == []


# qstat's JSON, which is not always JSON.

TEXT = """{
    "timestamp":1795227100,
    "Jobs":{
        "1.pbs-0001":{
            "Job_Name":NAME,
            "job_state":"R",
            "queue":"workq",
            "exec_host":"x1n0/0*2+x1n1/0*2",
            "Resource_List":{
                "select":"2:ncpus=2:mpiprocs=2",
                "walltime":"00:05:00"
            },
            "stime":"Sat Nov 21 02:10:43 2026",
            "Variable_List":{
                "PBS_O_HOME":"/home/alice",
                VARIABLE,
                "SHLVL":1
            },
            "Submit_arguments":ARGUMENTS
        }
    }
}
"""


def print_json(tmp_path, env, name='"probe"', variable='"A":"b"', arguments='"run.sh"'):
    text = TEXT.replace("NAME", name).replace("VARIABLE", variable).replace("ARGUMENTS", arguments)
    (tmp_path / "answer").write_bytes(text.encode("utf-8", "surrogateescape"))
    script(tmp_path, "qstat", f'cat "{tmp_path}/answer"')
    return {**env, "PBS_JOBID": "1.pbs-0001"}


@pytest.mark.parametrize(
    "variable",
    [
        '"LEVEL":007',
        '"LEVEL":nan',
        '"LEVEL":-007',
        r'"PS1":"\u@\h:\w\$ "',
        r'"LIST":"a\,b"',
        r'"QUOTE":"it\'s"',
        r'"WINDOWS":"C:\"',
        '"QUOTE":"say "x""',
        '"CONTROL":"a\x01\x1b[0mb\tc"',
        '"LATIN1":"caf\udce9"',
        '"BASH_FUNC_module()":"() {  eval `x`\\n}"',
    ],
)
def test_what_openpbs_does_not_escape_in_the_users_environment(tmp_path, pbs, variable):
    found = _pbs.allocation(print_json(tmp_path, pbs(), variable=variable))
    assert (found.hosts, found.slots, found.name) == (("x1n0", "x1n1"), (2, 2), "probe")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("007", "007"),
        ("nan", "nan"),
        ("Infinity", "Infinity"),
        ("1.50", "1.50"),
        (r'"a\.b"', r"a\.b"),
    ],
)
def test_what_openpbs_does_not_escape_in_a_jobs_name(tmp_path, pbs, name, told):
    assert _pbs.allocation(print_json(tmp_path, pbs(), name=name)).name == told


def test_unescaped_control_characters_elsewhere(tmp_path, pbs):
    env = print_json(tmp_path, pbs(), arguments='"-v X=\x01\n2 run.sh"')
    assert _pbs.allocation(env).num_nodes == 2


@pytest.mark.parametrize(
    "printed", ["", "[1]", "{", "Job Id: 1.pbs-0001", '{"Jobs":', '{"a":"b"c"}', "[" * 100_000]
)
def test_what_cannot_be_json_is_an_error(tmp_path, pbs, printed):
    env = {**pbs(), "PBS_JOBID": "1.pbs-0001"}
    (tmp_path / "answer").write_text(printed)
    script(tmp_path, "qstat", f'cat "{tmp_path}/answer"')
    with pytest.raises(SchedulerError, match="no JSON object"):
        _pbs.allocation(env)


@pytest.mark.parametrize("printed", ["{}", '{"Jobs":7}', '{"Jobs":{"1.pbs-0001":7}}'])
def test_json_without_the_job_is_an_error(tmp_path, pbs, printed):
    env = {**pbs(), "PBS_JOBID": "1.pbs-0001"}
    script(tmp_path, "qstat", f"echo '{printed}'")
    with pytest.raises(SchedulerError, match="not in the answer"):
        _pbs.allocation(env)


# The end of the walltime.


@pytest.mark.parametrize("zone", [None, "America/Chicago", "JST-9"])
def test_end_time_is_the_same_in_every_time_zone(pbs, zone):
    env = pbs(**{"1_pbs-0001": JOB})
    env = env if zone is None else {**env, "TZ": zone}
    assert _pbs.end_time("1.pbs-0001", env) == datetime(2026, 11, 21, 2, 15, 43, tzinfo=UTC)


@pytest.mark.parametrize(
    ("walltime", "seconds"),
    [
        ("300", 300),
        ("05:00", 300),
        ("72:00:00", 259_200),
        ("01:00:00:01", 86_401),
        ("00:00:30.5", 30),
    ],
)
def test_forms_of_walltime(pbs, walltime, seconds):
    env = pbs(**{"1_pbs-0001": job(Resource_List={"walltime": walltime})})
    assert _pbs.end_time("1.pbs-0001", env).timestamp() == STARTED + seconds


def test_a_job_without_walltime_has_no_end(pbs):
    env = pbs(**{"1_pbs-0001": job(Resource_List={"walltime": None})})
    assert _pbs.end_time("1.pbs-0001", env) is None


@pytest.mark.parametrize("walltime", ["soon", "1:2:3:4:5", "-1", "999999999:00:00:00"])
def test_a_walltime_that_does_not_parse_is_no_reason_to_lose_the_hosts(pbs, walltime):
    env = pbs(**{"1_pbs-0001": job(Resource_List={"walltime": walltime})})
    with pytest.raises(SchedulerError, match="walltime"):
        _pbs.end_time("1.pbs-0001", env)
    found = _pbs.allocation({**env, "PBS_JOBID": "1.pbs-0001"})
    assert (found.num_nodes, found.ends_at) == (2, None)


@pytest.mark.parametrize(
    "stime", ["soon", "Sat Nov 31 02:10:43 2026", "Sab Nov 21 2026", "1795227043"]
)
def test_a_start_that_does_not_parse(tmp_path, pbs, stime):
    env = print_json(tmp_path, pbs())
    text = (tmp_path / "answer").read_text().replace("Sat Nov 21 02:10:43 2026", stime)
    (tmp_path / "answer").write_text(text)
    with pytest.raises(SchedulerError, match="stime"):
        _pbs.end_time("1.pbs-0001", env)


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
    assert asked(tmp_path) == [
        "qselect -T -u alice -s R",
        "qstat -f -F json 1.pbs-0001 2.pbs-0001",
    ]


def test_a_shell_on_an_array_jobs_node(pbs):
    env = pbs(**{"40[1]_pbs-0001": JOB})
    assert _pbs.job_of_this_host(env, "x1n0").job_id == "40[1].pbs-0001"


def test_no_job_is_exit_0_and_nothing_printed(tmp_path, pbs):
    assert _pbs.job_of_this_host(pbs(), "x1n0") is None
    assert asked(tmp_path) == ["qselect -T -u alice -s R"]


def test_a_shell_on_a_host_of_no_job(pbs):
    assert _pbs.job_of_this_host(pbs(**{"1_pbs-0001": JOB}), "login1") is None
    # x1n1 is no part of x1n10
    assert _pbs.job_of_this_host(pbs(**{"1_pbs-0001": JOB}), "x1n10") is None


def test_two_jobs_on_this_host_are_named(pbs):
    env = pbs(**{"1_pbs-0001": JOB, "2_pbs-0001": JOB})
    with pytest.raises(
        SchedulerError, match=r"1.pbs-0001, 2.pbs-0001.*export PBS_JOBID=1.pbs-0001"
    ):
        _pbs.job_of_this_host(env, "x1n0")


def test_a_job_that_ended_since_qselect(tmp_path, pbs):
    env = pbs(**{"1_pbs-0001": JOB})
    script(tmp_path, "qselect", "echo 1.pbs-0001; echo 8.pbs-0001")
    assert _pbs.job_of_this_host(env, "x1n0").job_id == "1.pbs-0001"


def test_a_qstat_that_tells_only_the_first_of_several_jobs(tmp_path, pbs):
    env = pbs(**{"1_pbs-0001": JOB, "2_pbs-0001": job(exec_host="x1n2/0*2+x1n3/0*2")})
    (tmp_path / "qstat").rename(tmp_path / "real")
    script(tmp_path, "qstat", f'exec "{tmp_path}/real" "$1" "$2" "$3" "$4"')
    assert _pbs.job_of_this_host(env, "x1n2").job_id == "2.pbs-0001"


def test_without_qselect_there_is_no_job_to_find(tmp_path):
    assert _pbs.job_of_this_host({"PATH": str(tmp_path), "USER": "alice"}, "x1n0") is None


def test_a_qselect_that_fails(tmp_path, pbs):
    env = pbs()
    script(tmp_path, "qselect", "echo qselect: cannot connect to server >&2; exit 111")
    with pytest.raises(SchedulerError, match="cannot connect"):
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


def test_a_user_that_is_no_name_is_never_an_argument(tmp_path, pbs):
    with pytest.raises(InvalidVariableError, match="USER='-x'"):
        _pbs.job_of_this_host({**pbs(), "USER": "-x"}, "x1n0")
    assert asked(tmp_path) == []


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
