"""Command lines that no machine's golden file has."""

import os
import subprocess
from dataclasses import replace

import pytest

from ezpz_launch import LaunchError, Request, UsageError, plan
from ezpz_launch._plan.kind import Launcher
from ezpz_launch._plan.launchers import build_argv, build_hostfile
from ezpz_launch._plan.launchers.spawn import SPAWN
from ezpz_topo import imagine


def planned(launcher, machine="generic-slurm", of=4, *, hosts=None, env=None, **options):
    topology = imagine(machine, of, {})
    return plan(
        topology, Request(("true",), **options),
        launcher if isinstance(launcher, Launcher) else Launcher(launcher, launcher, ""),
        hosts=topology.allocation.hosts if hosts is None else hosts,
        hosts_source="argument" if hosts else "the job", hostfile="/tmp/hosts", port=1,
        user_env=env or {},
    )  # fmt: skip


def own_words(result):
    words = build_argv(result)
    return words[: words.index("sh")]


def test_spawn_is_a_program_of_ours_on_this_host():
    result = planned(Launcher("/python", "spawn", ""), of=1, nproc=3, launcher_args=("-x",))
    words = build_argv(result)
    assert words[:6] == ["/python", "-I", "-S", SPAWN, "3", "-x"]
    names = ["EZPZ_SPAWN_RANK", "EZPZ_SPAWN_SIZE", "EZPZ_SPAWN_RANK"]
    assert words[words.index("sh") + 2 :] == ["spawn", "3", "3", *names, "--", "true"]


@pytest.mark.parametrize(("kind", "options", "message"), [
    ("spawn", {}, "spawn starts ranks on this host, not on 2 hosts"),
    ("spawn", {"exclude": "node0001"}, "on this host, not on node0002, another host"),
    ("torchrun", {}, "torchrun starts ranks on one host, not on 2 from here"),
])  # fmt: skip
def test_what_reaches_no_other_host(kind, options, message):
    with pytest.raises(LaunchError, match=message):
        build_argv(planned(kind, of=2, **options))


@pytest.mark.parametrize("options", [{}, {"nodes": 1}, {"nodes": 1, "exclude": "a", "spares": 1}])
def test_hydra_takes_no_ipv6_address_of_another_host(options):
    hosts = ["2001:db8::7", "a", "2001:db8::8"]
    with pytest.raises(UsageError, match=r"2001:db8::7 \(.* no IPv6 address; expected a "):
        planned("hydra", machine="workstation", hosts=hosts, **options)
    result = planned("openmpi", machine="workstation", hosts=hosts)
    assert build_hostfile(result) == hosts


@pytest.mark.parametrize(("machine", "kind"), [("crux", "pals"), ("frontier", "srun")])
def test_no_binding_is_said_to_a_launcher_that_binds_by_itself(machine, kind):
    result = planned(kind, machine=machine, of=1, cpu_bind="none")
    flags = [word for word in build_argv(result) if "cpu-bind" in word or "depth" in word]
    assert flags == ["--cpu-bind=none"]
    # one that takes no lists does not get the machine's
    assert planned("hydra", machine=machine, of=1).cpu_bind == ()


@pytest.mark.parametrize(("hosts", "options", "nodelist"), [
    (None, {}, ""),
    (None, {"nodes": 2}, "node[0001-0002]"),
    (("NODE0002.example", "node0003"), {}, "node[0002-0003]"),
])  # fmt: skip
def test_srun_is_told_the_hosts_in_slurms_own_names(hosts, options, nodelist):
    result = planned("srun", hosts=hosts, ppn=2, **options)
    words = own_words(result)
    assert "--distribution=block" in words
    assert [word for word in words if word.startswith("--nodelist")] == (
        [f"--nodelist={nodelist}"] if nodelist else []
    )


@pytest.mark.parametrize(("hosts", "options", "lines"), [
    # out of the job's order: srun would sort them
    (("node0003.x", "node0001"), {"ppn": 2}, ["node0003", "node0003", "node0001", "node0001"]),
    # uneven: srun would even them out
    (None, {"nproc": 3, "nodes": 2}, ["node0001", "node0001", "node0002"]),
])  # fmt: skip
def test_srun_reads_the_host_of_each_rank(hosts, options, lines):
    result = planned("srun", hosts=hosts, **options)
    assert build_hostfile(result) == lines
    words = own_words(result)
    assert "--distribution=arbitrary" in words
    assert "--nodelist=/tmp/hosts" in words
    assert not any(word.startswith(("--nodes=", "--ntasks-per-node")) for word in words)
    assert result.environment["MASTER_ADDR"] == lines[0]


def test_a_nodelist_that_is_too_long_for_one_word_goes_into_the_file():
    # Names without a pattern: 4,000 of 60 characters.
    names = tuple(f"{'x' * 50}{k * 7919 % 100_003:06d}z" for k in range(4001))
    topology = imagine("generic-slurm", 1, {})
    job = replace(topology.allocation, hosts=names, node_name=names[0])
    result = plan(
        replace(topology, allocation=job), Request(("true",), nodes=4000, ppn=1),
        Launcher("srun", "srun", ""), hosts=names, hosts_source="the job", hostfile="/tmp/hosts",
        port=1, user_env={},
    )  # fmt: skip
    assert max(map(len, build_argv(result))) < 131_072
    assert len(build_hostfile(result)) == 4000


@pytest.mark.parametrize(("machine", "hosts", "error", "message"), [
    ("generic-slurm", ("node0001", "login1"), UsageError,
     r"login1 \(argument\): not in Slurm job hypothetical, which has node"),
    ("generic-slurm", ("node0002", "node0002.x"), UsageError, "two of these are one node"),
    ("workstation", None, LaunchError, "srun starts ranks in a Slurm job, and there is none"),
])  # fmt: skip
def test_srun_reaches_the_jobs_own_hosts_only(machine, hosts, error, message):
    with pytest.raises(error, match=message):
        planned("srun", machine, 1 if hosts is None else 4, hosts=hosts, ppn=1)


@pytest.mark.parametrize(
    ("machine", "ppn", "cpus"),
    [("perlmutter", 4, "32"), ("perlmutter", 2, "64"), ("perlmutter", 8, "16"),
     ("frontier", 8, "7"), ("frontier", 4, "14"), ("frontier", 112, "1")],
)  # fmt: skip
def test_cores_of_a_task_follow_the_ranks_of_a_host(machine, ppn, cpus):
    result = planned("srun", machine=machine, ppn=ppn)
    words = own_words(result)
    assert words[words.index("-c") + 1] == cpus
    assert ("flags" in result.sources) == (cpus not in ("32", "7"))


def test_open_mpi_is_told_the_launchs_own_variable_only_where_it_is_set():
    env = {"LD_LIBRARY_PATH": "/lib", "my.dotted": "1"}
    result = planned("openmpi", machine="sophia", env=env)
    assert "EZPZ_CONTROL" not in own_words(result)
    words = own_words(replace(result, control=("EZPZ_CONTROL", "EZPZ_CONTROL_1")))
    for name in ("EZPZ_CONTROL", "EZPZ_CONTROL_1"):
        assert words[words.index(name) - 1] == "-x"
    assert "my.dotted" not in words, "the shim restores it from the launch's own"
    # the machine's flags have it already
    assert words.count("LD_LIBRARY_PATH") == 1
    assert "-x" not in own_words(planned("openmpi", of=1))


@pytest.mark.parametrize(("nodes", "words"), [
    (1, ["x", "-n", "2", "-bootstrap", "fork", "-hosts", "localhost"]),
    (2, ["x", "-n", "4", "-ppn", "2", "-hostfile", "/tmp/hosts"]),
])  # fmt: skip
def test_intels_hydra_gets_no_flag_of_mpichs(nodes, words):
    intel = Launcher("x", "hydra", "", flavour="intel")
    result = planned(intel, machine="generic-pbs", of=nodes)
    assert own_words(result) == words
    assert ("I_MPI_JOB_RESPECT_PROCESS_PLACEMENT" in result.environment) == (nodes > 1)


def test_hydra_reaches_other_nodes_as_it_is_told(tmp_path):
    hydra = Launcher("x", "hydra", "", pbs_tmrsh="/pbs/pbs_tmrsh")
    result = planned(hydra, machine="generic-pbs", of=2)
    words = own_words(result)
    assert words[:7] == ["x", "-n", "4", "-ppn", "2", "-rmk", "user"]
    assert words[7:10] == ["-launcher", "rsh", "-launcher-exec"]
    assert words[11:] == ["-hostfile", "/tmp/hosts"]
    assert result.environment["EZPZ_PBS_TMRSH"] == "/pbs/pbs_tmrsh"
    # as Hydra calls it: options, the host, words that are quoted for a shell, and its own files
    tmrsh = tmp_path / "tmrsh"
    tmrsh.write_text('#!/bin/sh\necho "$@"; ls /proc/$$/fd')
    tmrsh.chmod(0o755)
    words = [words[10], "-l", "x1", '"/bin/true"', "it's"]
    bash = ["bash", "-c", 'exec 3<&0 5<&0 9<&0 "$@"', "bash", *words]
    done = subprocess.run(
        bash, env={"EZPZ_PBS_TMRSH": str(tmrsh), "PATH": os.defpath}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said, *files = done.stdout.splitlines()
    assert said == """x1 /bin/sh -c "/bin/true" it's"""
    assert not {"3", "5", "9"} & set(files)


@pytest.mark.parametrize(("machine", "env", "wanted"), [
    ("generic-slurm", {"SLURM_CPUS_PER_TASK": "8"}, ["--cpus-per-task=8"]),
    ("generic-slurm", {"SLURM_CPUS_PER_TASK": "tasks"}, []),
    ("generic-slurm", {}, []),
    ("perlmutter", {"SLURM_CPUS_PER_TASK": "8"}, ["-c", "32"]),
])  # fmt: skip
def test_srun_is_told_the_cores_that_the_job_asked_for(machine, env, wanted):
    result = planned("srun", machine=machine, env=env, ppn=4)
    words = own_words(result)
    found = [word for word in words if word.startswith("--cpus-per-task")]
    if "-c" in words:
        found += words[words.index("-c") : words.index("-c") + 2]
    assert found == wanted
    if env and machine == "generic-slurm" and found:
        assert result.environment["OMP_NUM_THREADS"] == "8"


def test_srun_is_kept_from_variables_that_move_its_output_or_hosts():
    env = {"SLURM_HOSTFILE": "f", "SLURM_STDERRMODE": "e", "SLURM_CPU_BIND": "x", "HOME": "/me"}
    assert set(planned("srun", env=env).removed) == {"SLURM_HOSTFILE", "SLURM_STDERRMODE"}
    inside = planned("srun", env={**env, "SLURM_STEP_ID": "4294967290"})
    assert set(inside.removed) == {"SLURM_HOSTFILE", "SLURM_STDERRMODE", "SLURM_CPU_BIND"}
    # it overlaps the step that we are in
    assert "--overlap" in own_words(inside)
    assert "--overlap" not in own_words(planned("srun", env=env))
    assert planned("openmpi", env=env).removed == ()


def test_open_mpi_brings_what_the_user_set():
    env = {"PATH": "/bin", "NCCL_DEBUG": "INFO", "PYTHONPATH": "/p", "TMPDIR": "/scratch",
           "OMP_NUM_THREADS": "3", "HOSTNAME": "a", "HOME": "/me", "SLURM_JOB_ID": "1",
           "%": "x"}  # fmt: skip
    # the user's own TMPDIR stands in place of the machine's, and must reach the other hosts
    words = own_words(planned("openmpi", machine="aurora", env=env))
    named = [words[at + 1] for at, word in enumerate(words) if word == "-x"]
    result = {"PATH", "NCCL_DEBUG", "PYTHONPATH", "TMPDIR", "OMP_NUM_THREADS", "MASTER_ADDR"}
    assert result <= {*named}
    assert not {"HOSTNAME", "HOME", "SLURM_JOB_ID", "%", "LD_LIBRARY_PATH"} & {*named}
    assert len({*named}) == len(named)
