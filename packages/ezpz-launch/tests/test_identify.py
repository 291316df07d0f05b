"""Which launcher it is: programs that answer as the real ones do, and a real one."""

import shlex
import time

import pytest

from ezpz_launch import CommandNotFoundError, LaunchError
from ezpz_launch._identify import Launcher, find_command, find_mpiexec, identify


def program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {shlex.quote(text)}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("HYDRA build details:\n    Version: 5.0.2", "hydra"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307", "hydra"),
        ("mpiexec (Open MPI) 5.0.11", "openmpi"),
        ("mpiexec (OpenRTE) 4.1.4", "openmpi"),
    ],
)
def test_an_mpiexec_is_asked_whose_it_is(tmp_path, answer, kind):
    assert identify(program(tmp_path / "mpiexec", answer)).kind == kind


@pytest.mark.parametrize(
    ("answer", "flavour"),
    [("HYDRA build details:", ""), ("Intel(R) MPI Library for Linux* OS", "intel")],
)
def test_intels_hydra_is_told_from_mpichs(tmp_path, answer, flavour):
    assert identify(program(tmp_path / "mpiexec", answer)).flavour == flavour


@pytest.mark.parametrize(
    ("kind", "of_machine", "is_of"),
    [
        ("pals", "pals", True),
        ("hydra", "pals", False),
        ("hydra", "mpiexec", True),
        ("spawn", "mpiexec", False),
    ],
)
def test_whether_it_is_the_machines_own(kind, of_machine, is_of):
    assert Launcher("x", kind, "").is_of(of_machine) is is_of


def test_there_is_time_while_it_is_asked(tmp_path):
    asked, go = tmp_path / "asked", tmp_path / "go"
    path = tmp_path / "mpiexec"
    path.write_text(
        f"#!/bin/sh\n: >{asked}\nwhile [ ! -e {go} ]; do sleep 0.05; done\necho HYDRA\n"
    )
    path.chmod(0o755)

    def meanwhile():
        while not asked.exists():
            time.sleep(0.01)
        go.touch()

    assert find_mpiexec({"PATH": str(tmp_path)}, meanwhile=meanwhile).kind == "hydra"


def test_what_fails_meanwhile_ends_the_question(tmp_path):
    path = tmp_path / "mpiexec"
    path.write_text("#!/bin/sh\nexec sleep 600\n")
    path.chmod(0o755)

    def meanwhile():
        raise ImportError("half an environment")

    with pytest.raises(ImportError, match="half an environment"):
        identify(str(path), meanwhile)


def test_an_unknown_mpiexec(tmp_path):
    path = program(tmp_path / "mpiexec", "Acme MPI 1.0")
    with pytest.raises(LaunchError, match=r"'Acme MPI 1.0'; expected MPICH's Hydra"):
        identify(path)


def test_pbss_own_mpiexec_is_passed_over_where_an_mpis_follows(tmp_path):
    # captured from OpenPBS 23.06, whose profile puts it on PATH
    pbs = program(tmp_path / "pbs" / "mpiexec", "pbs_version = 23.06.06")
    mpich = program(tmp_path / "mpich" / "mpiexec", "HYDRA build details:")
    found = find_mpiexec({"PATH": f"{tmp_path}/pbs"}, beside=f"{tmp_path}/mpich")
    assert (found.path, found.kind) == (mpich, "hydra")
    assert found.source.endswith(f"; passed over {pbs}: no MPI's")
    with pytest.raises(LaunchError, match=r"'pbs_version = 23\.06\.06'; expected MPICH's Hydra"):
        find_mpiexec({"PATH": f"{tmp_path}/pbs"})


def test_pals_is_known_by_where_it_lies(tmp_path, monkeypatch):
    monkeypatch.setattr("ezpz_launch.launchers.pals.Pals.folder", str(tmp_path / "pals"))
    site = program(tmp_path / "pals" / "mpiexec", "mpiexec 1.3.4")
    assert identify(site).kind == "pals"


def test_an_mpiexec_that_shadows_the_sites_is_warned_about(tmp_path, monkeypatch):
    monkeypatch.setattr("ezpz_launch.launchers.pals.Pals.folder", str(tmp_path / "pals"))
    site = program(tmp_path / "pals" / "mpiexec", "mpiexec 1.3.4")
    conda = program(tmp_path / "conda" / "mpiexec", "HYDRA")
    found = find_mpiexec({"PATH": f"{tmp_path}/conda:{tmp_path}/pals"})
    assert (found.path, found.kind) == (conda, "hydra")
    assert f"{conda} comes before the site's {site}" in found.notes[0]
    assert find_mpiexec({"PATH": f"{tmp_path}/pals:{tmp_path}/conda"}).notes == ()


def test_the_real_mpiexec_is_known(mpiexec):
    assert identify(mpiexec).kind in ("hydra", "openmpi")


def test_path_comes_before_this_environments_own(tmp_path):
    for name in ("site", "venv"):
        program(tmp_path / name / "mpiexec", "HYDRA")
    env = {"PATH": str(tmp_path / "site")}
    beside = str(tmp_path / "venv")
    assert find_mpiexec(env, beside=beside).path == str(tmp_path / "site" / "mpiexec")
    assert find_mpiexec({}, beside=beside).path == str(tmp_path / "venv" / "mpiexec")


def test_no_mpiexec_at_all(tmp_path):
    with pytest.raises(CommandNotFoundError, match="pip install mpich"):
        find_mpiexec({"PATH": str(tmp_path)}, beside=str(tmp_path))


def test_a_launcher_of_one_name(tmp_path):
    path = program(tmp_path / "srun", "slurm 22.05.8")
    assert find_command("srun", "srun", {"PATH": str(tmp_path)}).path == path
    with pytest.raises(CommandNotFoundError, match="no torchrun on PATH"):
        find_command("torchrun", "torchrun", {"PATH": str(tmp_path)})
