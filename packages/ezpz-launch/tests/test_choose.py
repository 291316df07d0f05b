"""Which launcher: programs that answer as the real ones do, on a PATH of their own."""

import sys
from dataclasses import replace

import pytest

from ezpz_launch import CommandNotFoundError, LaunchError, Request
from ezpz_launch._identify import choose_launcher, imagine_launcher
from ezpz_launch._placement import arrange
from ezpz_topo import imagine

ANSWERS = {
    "mpiexec": "HYDRA build details",
    "mpirun": "mpirun (Open MPI) 4.1",
    "srun": "",
    "torchrun": "",
}
TM = "HYDRA build details\n  Launchers available:   ssh rsh fork pbs manual\n"


def chosen(tmp_path, topology, programs, *, launcher="auto", more=(), **options):
    tmp_path.mkdir(exist_ok=True)
    for name in programs:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho '{ANSWERS.get(name, '')}'\n")
        path.chmod(0o755)
    request = Request(("true",), launcher=launcher, **options)
    job = topology.allocation
    arrangement = arrange(topology, request, hosts=job.hosts, hosts_source="the job")
    env = {"PATH": str(tmp_path), **dict(more)}
    return choose_launcher(topology, request, env, beside="", arrangement=arrangement)


@pytest.mark.parametrize(
    ("machine", "nodes", "options", "kind"),
    [
        ("workstation", 1, {}, "hydra"),
        ("sophia", 1, {}, "openmpi"),
        ("sophia", 2, {}, "openmpi"),
        ("generic-pbs", 2, {}, "hydra"),
        # Slurm's own reaches other nodes; here mpiexec needs no cores that a step holds
        ("generic-slurm", 2, {}, "srun"),
        ("generic-slurm", 1, {}, "hydra"),
        ("generic-slurm", 2, {"nodes": 1}, "hydra"),
        ("generic-slurm", 2, {"nproc": 1}, "hydra"),
        ("generic-slurm", 2, {"exclude": "node0001"}, "srun"),
        # a named machine's flags are srun's, also on one node
        ("frontier", 1, {}, "srun"),
    ],
)
def test_what_is_chosen_where_all_are_here(tmp_path, machine, nodes, options, kind):
    found = chosen(tmp_path, imagine(machine, nodes, {}), ANSWERS, **options)
    assert found.kind == kind
    assert found.path.startswith(str(tmp_path))
    assert found.notes == ()


def test_a_host_elsewhere_is_no_host_here(tmp_path):
    # The hosts in use decide, not the job's: a login node is none of them.
    topology = imagine("generic-slurm", 1, {})
    login = replace(topology, allocation=replace(topology.allocation, node_name=None))
    assert chosen(tmp_path, login, ANSWERS).kind == "srun"


def test_without_any_mpi_this_hosts_ranks_are_plain_processes(tmp_path):
    found = chosen(tmp_path, imagine("workstation", 1, {}), ())
    assert (found.kind, found.path) == ("spawn", sys.executable)
    assert found.source == "no mpiexec on PATH or in this environment"
    assert "a program that uses MPI itself would be a world of one" in found.notes[0]


def test_in_a_slurm_job_without_mpiexec_srun_gives_mpi_its_world(tmp_path):
    assert chosen(tmp_path, imagine("generic-slurm", 1, {}), ["srun"]).kind == "srun"
    assert chosen(tmp_path, imagine("frontier", 1, {}), ["srun"]).kind == "srun"


@pytest.mark.parametrize(
    ("machine", "message"), [("generic-pbs", "no mpiexec on PATH"), ("generic-slurm", "no srun")]
)
def test_several_hosts_need_a_launcher(tmp_path, machine, message):
    with pytest.raises(CommandNotFoundError, match=message):
        chosen(tmp_path, imagine(machine, 2, {}), ())


def in_job(tmp_path, **more):
    """The environment of a PBS job whose own commands are elsewhere."""
    conf = tmp_path / "pbs.conf"
    conf.write_text(f"PBS_SERVER=pbs-1\nPBS_EXEC={tmp_path}/pbs\n")
    return {"PBS_JOBID": "1.pbs-1", "PBS_CONF_FILE": str(conf), **more}


def test_other_nodes_of_a_pbs_job_are_reached_through_pbs_then_by_ssh(tmp_path):
    topology, env = imagine("generic-pbs", 2, {}), in_job(tmp_path)
    found = chosen(tmp_path / "ssh", topology, ["mpiexec", "ssh"], more=env)
    assert (found.pbs_tmrsh, found.source[-7:]) == ("", "ssh/ssh")
    chosen(tmp_path / "pbs", topology, ["mpiexec"], more={})
    (tmp_path / "pbs" / "bin").mkdir()
    tmrsh = tmp_path / "pbs" / "bin" / "pbs_tmrsh"
    tmrsh.touch(0o755)
    found = chosen(tmp_path / "ssh", topology, (), more=env)
    assert found.pbs_tmrsh == str(tmrsh)
    assert found.source == f"--version says HYDRA; other nodes by {tmrsh}"
    env = {"PBS_JOBID": "1.pbs-1", "PBS_CONF_FILE": "/dev/null", "PBS_O_PATH": str(tmrsh.parent)}
    assert chosen(tmp_path / "ssh", topology, (), more=env).pbs_tmrsh == str(tmrsh)


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"HYDRA_LAUNCHER": "ssh"}, {}),
        ({"HYDRA_BOOTSTRAP_EXEC": "/x"}, {}),
        ({}, {"launcher_args": ("-launcher", "manual")}),
        ({}, {"nproc": 1}),  # here
        ({"PBS_JOBID": ""}, {}),
    ],
)
def test_where_it_is_told_or_needs_none(tmp_path, more, options):
    env = in_job(tmp_path, **more)
    found = chosen(tmp_path, imagine("generic-pbs", 2, {}), ["mpiexec"], more=env, **options)
    assert (found.pbs_tmrsh, found.source) == ("", "--version says HYDRA")


def test_hydra_that_knows_pbs_needs_none(tmp_path, monkeypatch):
    monkeypatch.setitem(ANSWERS, "mpiexec", TM)
    found = chosen(tmp_path, imagine("generic-pbs", 2, {}), ["mpiexec"], more=in_job(tmp_path))
    assert (found.pbs_tmrsh, found.flavour) == ("", "tm")


def test_nothing_reaches_the_other_nodes_of_a_pbs_job(tmp_path):
    with pytest.raises(LaunchError, match="neither pbs_tmrsh nor ssh is here; expected one of"):
        chosen(tmp_path, imagine("generic-pbs", 2, {}), ["mpiexec"], more=in_job(tmp_path))


@pytest.mark.parametrize(
    ("asked", "kind"),
    [("mpiexec", "hydra"), ("hydra", "hydra"), ("srun", "srun"), ("torchrun", "torchrun"),
     ("spawn", "spawn")],
)  # fmt: skip
def test_the_users_word(tmp_path, asked, kind):
    found = chosen(tmp_path, imagine("workstation", 1, {}), ANSWERS, launcher=asked)
    assert found.kind == kind


def test_another_than_was_asked_for(tmp_path):
    with pytest.raises(LaunchError, match=r"--launcher pals: .* is hydra"):
        chosen(tmp_path, imagine("aurora", 1, {}), ANSWERS, launcher="pals")


def test_an_imagined_mpiexec_is_the_sites_own():
    request = Request(("true",), launcher="mpiexec")
    assert imagine_launcher(imagine("aurora", 1, {}), request).kind == "pals"
    assert imagine_launcher(imagine("sophia", 1, {}), request).path == "mpirun"


@pytest.mark.parametrize(
    ("launcher", "kind", "source"),
    [
        ("auto", "srun", "frontier.toml, not looked for"),
        ("mpiexec", "hydra", "--launcher mpiexec, not looked for"),
        ("spawn", "spawn", "--launcher spawn, not looked for"),
    ],
)
def test_one_that_is_imagined(launcher, kind, source):
    found = imagine_launcher(imagine("frontier", 1, {}), Request(("true",), launcher=launcher))
    assert (found.kind, found.source) == (kind, source)
