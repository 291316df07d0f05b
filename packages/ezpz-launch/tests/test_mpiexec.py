import shlex

import pytest

from ezpz_launch import CommandNotFoundError, LaunchError, LaunchPlan
from ezpz_launch.launchers import mpiexec as module

PLAN = LaunchPlan(("python", "train.py", "--x", ""), 2, ("laptop",), {})


def program(path, text):
    path.write_text(f"#!/bin/sh\necho {shlex.quote(text)}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ("HYDRA build details:\n    Version: 5.0.2", "hydra"),
        ("mpiexec (Open MPI) 5.0.11", "openmpi"),
        ("mpiexec (OpenRTE) 4.1.4", "openmpi"),
    ],
)
def test_an_mpiexec_is_asked_whose_it_is(tmp_path, answer, kind):
    assert module.identify(program(tmp_path / "mpiexec", answer)).kind == kind


def test_an_unknown_mpiexec(tmp_path):
    path = program(tmp_path / "mpiexec", "Acme MPI 1.0")
    with pytest.raises(LaunchError, match=r"'Acme MPI 1.0'; expected MPICH's Hydra or Open MPI"):
        module.identify(path)


def test_the_real_mpiexec_is_known(mpiexec):
    assert module.identify(mpiexec).kind in ("hydra", "openmpi")


def test_path_comes_before_this_environments_own(tmp_path):
    for name in ("site", "venv"):
        (tmp_path / name).mkdir()
        program(tmp_path / name / "mpiexec", "HYDRA")
    env = {"PATH": str(tmp_path / "site")}
    beside = str(tmp_path / "venv")
    assert module.find(env, beside=beside).path == str(tmp_path / "site" / "mpiexec")
    assert module.find({}, beside=beside).path == str(tmp_path / "venv" / "mpiexec")


def test_no_mpiexec_at_all(tmp_path):
    with pytest.raises(CommandNotFoundError, match="pip install mpich"):
        module.find({"PATH": str(tmp_path)}, beside=str(tmp_path))


def test_the_command_line_of_hydra():
    words = module.argv(PLAN, module.Mpiexec("/venv/bin/mpiexec", "hydra", ""))
    assert words == [
        "/venv/bin/mpiexec", "-n", "2",
        "-launcher", "fork", "-rmk", "user", "-host", "localhost", "sh", module.SHIM,
        "pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
        "--", "python", "train.py", "--x", "",
    ]  # fmt: skip


@pytest.mark.parametrize(("uid", "extra"), [(0, ["--allow-run-as-root"]), (1000, [])])
def test_the_command_line_of_openmpi(monkeypatch, uid, extra):
    monkeypatch.setattr(module.os, "geteuid", lambda: uid)
    words = module.argv(PLAN, module.Mpiexec("/usr/bin/mpiexec", "openmpi", ""))
    placed = ["--oversubscribe", "--bind-to", "none"]
    assert words[: 6 + len(extra)] == ["/usr/bin/mpiexec", "-n", "2", *placed, *extra]
    assert "OMPI_COMM_WORLD_RANK" in words


def test_a_colon_of_the_users_is_hidden_from_mpiexec():
    plan = LaunchPlan(("python", "x.py", ":", "+"), 1, ("laptop",), {})
    words = module.argv(plan, module.Mpiexec("mpiexec", "hydra", ""))
    assert words[-5:] == ["--escaped", "+python", "+x.py", "+:", "++"]
