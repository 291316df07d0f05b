"""Which launcher it is, and which is taken; the user's command; launches inside of ranks."""

import os
import shlex
import sys
from dataclasses import replace

import pytest

from ezpz_launch import (
    CommandNotExecutableError,
    CommandNotFoundError,
    LaunchError,
    Request,
    UsageError,
)
from ezpz_launch._plan.choose import choose_launcher, imagine_launcher
from ezpz_launch._plan.command import require_command, require_program
from ezpz_launch._plan.environment import strip_launcher_env
from ezpz_launch._plan.executables import env_with_python_on_path
from ezpz_launch._plan.identify import find_mpiexec, identify_mpiexec
from ezpz_launch._plan.placement import arrange
from ezpz_topo import FAMILIES, get_rank_info, imagine

# Which it is.


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {shlex.quote(text)}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("answer", "kind", "flavour"), [
    ("HYDRA build details:\n    Version: 5.0.2", "hydra", ""),
    ("HYDRA build details\n  Launchers available:   ssh rsh fork pbs manual\n", "hydra", "tm"),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307", "hydra", "intel"),
    ("mpiexec (Open MPI) 5.0.11", "openmpi", ""),
    ("mpiexec (OpenRTE) 4.1.4", "openmpi", ""),
])  # fmt: skip
def test_an_mpiexec_is_asked_whose_it_is(tmp_path, answer, kind, flavour):
    found = identify_mpiexec(program(tmp_path / "mpiexec", answer))
    assert (found.kind, found.flavour) == (kind, flavour)


def test_pbss_own_mpiexec_is_passed_over_where_an_mpis_follows(tmp_path):
    # captured from OpenPBS 23.06, whose profile puts it on PATH
    pbs = program(tmp_path / "pbs" / "mpiexec", "pbs_version = 23.06.06")
    mpich = program(tmp_path / "mpich" / "mpiexec", "HYDRA build details:")
    found = find_mpiexec({"PATH": f"{tmp_path}/pbs:{tmp_path}/mpich"})
    assert (found.path, found.kind) == (mpich, "hydra")
    assert found.source.endswith(f"; passed over {pbs}: no MPI's")
    with pytest.raises(LaunchError, match=r"'pbs_version = 23\.06\.06'; expected MPICH's Hydra"):
        find_mpiexec({"PATH": f"{tmp_path}/pbs"})


def test_pals_is_known_by_where_it_lies_and_what_shadows_it_is_warned_about(tmp_path, monkeypatch):
    monkeypatch.setattr("ezpz_launch._plan.launchers.pals.Pals.folder", str(tmp_path / "pals"))
    site = program(tmp_path / "pals" / "mpiexec", "mpiexec 1.3.4")
    conda = program(tmp_path / "conda" / "mpiexec", "HYDRA")
    assert identify_mpiexec(site).kind == "pals"
    found = find_mpiexec({"PATH": f"{tmp_path}/conda:{tmp_path}/pals"})
    assert (found.path, found.kind) == (conda, "hydra")
    assert f"{conda} comes before the site's {site}" in found.notes[0]
    assert find_mpiexec({"PATH": f"{tmp_path}/pals:{tmp_path}/conda"}).notes == ()


def test_path_comes_before_this_environments_own(tmp_path, mpiexec, monkeypatch):
    assert identify_mpiexec(mpiexec).kind in ("hydra", "openmpi")
    site, own = (program(tmp_path / name / "mpiexec", "HYDRA") for name in ("site", "venv"))
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/venv/python")
    assert find_mpiexec(env_with_python_on_path({"PATH": f"{tmp_path}/site"})).path == site
    assert find_mpiexec(env_with_python_on_path({})).path == own


# Which is taken.

ANSWERS = {"mpiexec": "HYDRA build details", "mpirun": "mpirun (Open MPI) 4.1"}
ANSWERS |= dict.fromkeys(("srun", "torchrun"), "")
TM = "HYDRA build details\n  Launchers available:   ssh rsh fork pbs manual\n"


def chosen(tmp_path, topology, programs, *, launcher="auto", more=(), **options):
    tmp_path.mkdir(exist_ok=True)
    for name in programs:
        program(tmp_path / name, ANSWERS.get(name, ""))
    request = Request(("true",), launcher=launcher, **options)
    job = topology.allocation
    arrangement = arrange(topology, request, hosts=job.hosts, hosts_source="the job")
    env = {"PATH": str(tmp_path), **dict(more)}
    return choose_launcher(arrangement, topology=topology, request=request, env=env)


@pytest.mark.parametrize(("machine", "programs", "options", "kind"), [
    ("workstation 1", ANSWERS, {}, "hydra"),
    ("sophia 1", ANSWERS, {}, "openmpi"),
    ("generic-pbs 2", ANSWERS, {}, "hydra"),
    # Slurm's own reaches other nodes; here mpiexec needs no cores that a step holds
    ("generic-slurm 2", ANSWERS, {}, "srun"),
    ("generic-slurm 1", ANSWERS, {}, "hydra"),
    ("generic-slurm 2", ANSWERS, {"nodes": 1}, "hydra"),
    ("generic-slurm 2", ANSWERS, {"nproc": 1}, "hydra"),
    ("generic-slurm 2", ANSWERS, {"exclude": "node0001"}, "srun"),
    # a named machine's flags are srun's, also on one node
    ("frontier 1", ANSWERS, {}, "srun"),
    # without mpiexec srun gives MPI its world
    ("generic-slurm 1", ["srun"], {}, "srun"),
    # the user's word
    ("workstation 1", ANSWERS, {"launcher": "mpiexec"}, "hydra"),
    ("workstation 1", ANSWERS, {"launcher": "srun"}, "srun"),
    ("workstation 1", ANSWERS, {"launcher": "torchrun"}, "torchrun"),
    ("workstation 1", ANSWERS, {"launcher": "spawn"}, "spawn"),
    ("generic-pbs 2", (), {}, "no mpiexec on PATH.*pip install mpich"),
    ("generic-slurm 2", (), {}, "no srun"),
    ("workstation 1", ["mpiexec"], {"launcher": "torchrun"}, "no torchrun on PATH"),
    ("aurora 1", ["mpiexec"], {"launcher": "pals"}, "--launcher pals: .* is hydra"),
])  # fmt: skip
def test_which_is_chosen(tmp_path, machine, programs, options, kind):
    name, nodes = machine.split()
    topology = imagine(name, int(nodes), {})
    if " " in kind:
        with pytest.raises(LaunchError, match=kind) as caught:
            chosen(tmp_path, topology, programs, **options)
        assert isinstance(caught.value, CommandNotFoundError) is kind.startswith("no ")
    else:
        found = chosen(tmp_path, topology, programs, **options)
        assert (found.kind, found.notes) == (kind, ())
        assert found.path.startswith(str(tmp_path)) or kind == "spawn"


def test_without_any_mpi_this_hosts_ranks_are_plain_processes(tmp_path):
    found = chosen(tmp_path, imagine("workstation", 1, {}), ())
    assert (found.kind, found.path) == ("spawn", sys.executable)
    assert found.source == "no mpiexec on PATH or in this environment"
    assert "a program that uses MPI itself would be a world of one" in found.notes[0]
    # The hosts in use decide, not the job's: a login node is none of them.
    topology = imagine("generic-slurm", 1, {})
    login = replace(topology, allocation=replace(topology.allocation, node_name=None))
    assert chosen(tmp_path, login, ANSWERS).kind == "srun"


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


@pytest.mark.parametrize(("more", "options"), [
    ({"HYDRA_LAUNCHER": "ssh"}, {}),
    ({"HYDRA_BOOTSTRAP_EXEC": "/x"}, {}),
    ({}, {"launcher_args": ("-launcher", "manual")}),
    ({}, {"nproc": 1}),  # here
    ({"PBS_JOBID": ""}, {}),
])  # fmt: skip
def test_where_it_is_told_or_needs_none(tmp_path, more, options):
    env = in_job(tmp_path, **more)
    found = chosen(tmp_path, imagine("generic-pbs", 2, {}), ["mpiexec"], more=env, **options)
    assert (found.pbs_tmrsh, found.source) == ("", "--version says HYDRA")


def test_nothing_reaches_the_other_nodes_of_a_pbs_job_but_hydra_that_knows_pbs(
    tmp_path, monkeypatch
):
    topology, env = imagine("generic-pbs", 2, {}), in_job(tmp_path)
    with pytest.raises(LaunchError, match="neither pbs_tmrsh nor ssh is here; expected one of"):
        chosen(tmp_path, topology, ["mpiexec"], more=env)
    monkeypatch.setitem(ANSWERS, "mpiexec", TM)
    found = chosen(tmp_path, topology, ["mpiexec"], more=env)
    assert (found.pbs_tmrsh, found.flavour) == ("", "tm")


@pytest.mark.parametrize(("machine", "launcher", "kind", "source"), [
    ("frontier", "auto", "srun", "frontier.toml, not looked for"),
    ("frontier", "mpiexec", "hydra", "--launcher mpiexec, not looked for"),
    ("aurora", "mpiexec", "pals", "--launcher mpiexec, not looked for"),
    ("frontier", "spawn", "spawn", "--launcher spawn, not looked for"),
])  # fmt: skip
def test_one_that_is_hypothetical(machine, launcher, kind, source):
    found = imagine_launcher(imagine(machine, 1, {}), Request(("true",), launcher=launcher))
    assert (found.kind, found.source) == (kind, source)


# The user's command.


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, mode in (("program", 0o755), ("train.py", 0o644), ("data", 0o644)):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(mode)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_can_be_executed(folder):
    (folder / "folder" / "data").write_text("")
    (folder / "folder" / "data").chmod(0o755)
    env = {"PATH": os.pathsep.join(["/absent", str(folder), str(folder / "folder")])}
    # of data the first that can be executed counts
    for name in ("program", "./program", str(folder / "program"), "data"):
        require_command(name, env)


@pytest.mark.parametrize(("program", "error", "text"), [
    ("absent", CommandNotFoundError, "'absent': not found on PATH"),
    ("/absent/x", CommandNotFoundError, "'/absent/x': no such file"),
    ("", CommandNotFoundError, "'': not found on PATH"),
    ("program", CommandNotFoundError,
     "'program': not found on PATH; try: ezpz-launch ./program"),
    ("train.py", CommandNotFoundError,
     "'train.py': not found on PATH; try: ezpz-launch python train.py"),
    ("./train.py", CommandNotExecutableError,
     "./train.py is not executable; try: ezpz-launch python ./train.py"),
    ("./data", CommandNotExecutableError, "./data is not executable; try: chmod +x ./data"),
])  # fmt: skip
def test_what_cannot_be_executed(folder, program, error, text):
    with pytest.raises(error) as caught:
        require_command(program, {"PATH": "/absent"})
    assert str(caught.value) == text
    assert caught.value.exit_status == (127 if error is CommandNotFoundError else 126)


def test_where_a_relative_path_is_looked_for(folder):
    (folder / "elsewhere" / "folder").mkdir(parents=True)
    (folder / "elsewhere" / "folder" / "train.py").touch()
    for program, hint in (
        ("./absent", "give its path from there, or a whole one"),
        ("folder/train.py", f"try: cd {folder}/elsewhere"),
    ):
        with pytest.raises(CommandNotFoundError) as caught:
            require_command(program, {"PBS_O_WORKDIR": str(folder / "elsewhere")})
        assert str(caught.value) == f"{program!r}: no such file in {folder}; {hint}"


@pytest.mark.parametrize(("command", "remedy"), [
    ("python", "python -c CODE"),
    ("/usr/bin/python3.11 -", "python3.11 -c CODE"),
    ("python -u -", "python -c CODE"),
    ("python /dev/stdin", "python -c CODE"),
    ("bash -s", "bash -c CODE"),
])  # fmt: skip
def test_an_interpreter_without_a_program(command, remedy):
    with pytest.raises(UsageError) as caught:
        require_program(command.split())
    text = str(caught.value)
    name = remedy.split()[0]
    assert text.startswith(f"{command!r}: {name} without a program; expected one, such as: ")
    assert f" {remedy}, or: {name} FILE; every rank reads /dev/null" in text


@pytest.mark.parametrize("command", [
    "python -u train.py -", "python -c code -", "python -mpdb", "python -V", "bash x.sh -s",
    "bash -c true", "echo python", "./bash_me", "pythonic -", "perl -",
])  # fmt: skip
def test_a_command_that_has_its_program(command):
    require_program(command.split())


# A launch inside a rank of another.


def variables(text):
    return dict(pair.split("=") for pair in text.split())


MORE = variables(
    "GROUP_WORLD_SIZE=1 LOCAL_SIZE=2 PMI_FD=9 PMI_PORT=a:1 PMI_ID=1 HYDI_CONTROL_FD=8 OMPI_ARGV=x "
    "PMIX_RANK=1 PMIX_NAMESPACE=n PMIX_SERVER_URI41=u PRTE_LAUNCHED=1 PALS_APID=x "
    "SLURM_PROCID=1 SLURM_LOCALID=1"
)
"""What launchers tell their ranks beside the variables of their table: as torchrun, MPICH 5.0.2,
Open MPI 5.0.11, PALS and Slurm set them."""

STAYS = variables(
    "PATH=/bin HOME=/home/a LANG=C CUDA_VISIBLE_DEVICES=0,1 "
    # settings, of the user or the site
    "OMPI_MCA_btl=tcp PMIX_MCA_gds=hash PRTE_MCA_plm=ssh MPICH_GPU_SUPPORT_ENABLED=1 "
    "FI_PROVIDER=tcp NCCL_DEBUG=INFO "
    # the job's, and where the step's cores are
    "SLURM_JOB_ID=7 SLURM_JOBID=7 SLURM_STEP_ID=0 SLURM_CPUS_ON_NODE=8 SLURM_JOB_NODELIST=n[1-2] "
    "SLURM_STEP_NUM_TASKS=2 PBS_JOBID=7.pbs PBS_NODEFILE=/var/spool/7.pbs FLUX_URI=local:///run "
    # ours, that say nothing of a rank
    "EZPZ_STATE_DIR=/home/a/state EZPZ_MACHINE=aurora "
    # what only looks like it
    "MY_PMI_RANK=1 RANKING=1 PMIRROR=1 WORLD_SIZE_MAX=3"
)


def test_what_makes_a_rank_goes():
    told = dict(MORE)
    for each in FAMILIES:
        if each.name != "slurm":  # some of its own say where the step's cores are
            names = each.rank + each.world_size + each.local_rank + each.local_world_size
            told |= dict.fromkeys(names + each.node_rank + each.num_nodes, "1")
    env = {**STAYS, **told}
    assert strip_launcher_env(env) == STAYS
    assert env == {**STAYS, **told}


def test_what_is_left_is_no_rank():
    ezpz = "EZPZ_RANK=1 EZPZ_WORLD_SIZE=2 EZPZ_LOCAL_RANK=1 EZPZ_LOCAL_WORLD_SIZE=2"
    env = {**STAYS, **variables(f"{ezpz} SLURM_PROCID=1 SLURM_LOCALID=1")}
    assert get_rank_info(env).rank == 1
    left = get_rank_info({**strip_launcher_env(env), "SLURM_STEP_ID": ""})
    assert (left.rank, left.world_size) == (0, 1)
