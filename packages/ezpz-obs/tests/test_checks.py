"""The check ``wandb`` of ``ezpz doctor``: no server is asked, and no library is imported."""

import subprocess
import sys

import pytest

from ezpz_obs._checks import wandb

HOST = "api.wandb.ai"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home without credentials, and W&B installed, by what an installer leaves of it."""
    (tmp_path / "site" / "wandb").mkdir(parents=True)
    (tmp_path / "site" / "wandb" / "__init__.py").write_text("raise RuntimeError('not imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def look(home, **variables):
    return wandb(5, {"HOME": str(home), **variables})


def test_not_installed_is_well(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    result = look(tmp_path)
    assert (result.status, result.details) == ("ok", {"installed": False})


def test_without_credentials_runs_stay_here(home):
    result = look(home)
    assert result.status == "warning"
    assert "no credentials for https://api.wandb.ai: runs are kept offline" in result.message
    assert "wandb login" in result.remedy


@pytest.mark.parametrize("mode", ["offline", "dryrun"])
def test_offline_on_purpose_is_well(home, mode):
    result = look(home, WANDB_MODE=mode)
    assert (result.status, result.details["mode"]) == ("ok", "offline")


def test_disabled_is_well(home):
    assert look(home, WANDB_DISABLED="true").status == "ok"
    assert look(home, WANDB_MODE="disabled").details["mode"] == "disabled"


def test_online_without_credentials_is_an_error(home):
    result = look(home, WANDB_MODE="online")
    assert result.status == "error"
    assert "WANDB_MODE=online, and there are no credentials" in result.message


def test_credentials_are_found_and_not_shown(home):
    key = "0123456789abcdef" * 3
    result = look(home, WANDB_API_KEY=key)
    assert result.status == "ok"
    assert "with the credentials of WANDB_API_KEY" in result.message
    (home / ".netrc").write_text(f"machine {HOST} login user password {key}\n")
    kept = look(home)
    assert kept.status == "ok"
    assert f"{home}/.netrc" in kept.message
    assert key not in f"{result} {kept}"


def test_credentials_of_another_server_are_none(home):
    (home / ".netrc").write_text(f"machine {HOST} login user password secret\n")
    result = look(home, WANDB_BASE_URL="https://wandb.example.org")
    assert result.status == "warning"
    assert "no credentials for https://wandb.example.org" in result.message


def test_neither_wandb_nor_torch_is_imported():
    code = (
        "import sys\nfrom ezpz_obs._checks import wandb\nwandb(5)\n"
        "assert not {'wandb', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
