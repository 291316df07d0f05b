"""The check ``wandb`` of ``ezpz doctor``: no server is asked, and no library is imported."""

import sys

import pytest

from ezpz_obs._checks import wandb

KEY = "0123456789abcdef" * 3
NETRC = f"machine api.wandb.ai login user password {KEY}\n"
NONE = "no credentials for https://api.wandb.ai: runs are kept offline"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home without credentials, and W&B installed, by what an installer leaves of it."""
    (tmp_path / "site" / "wandb").mkdir(parents=True)
    (tmp_path / "site" / "wandb" / "__init__.py").write_text("raise RuntimeError('not imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_not_installed_is_well(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    result = wandb(5, {"HOME": str(tmp_path)})
    assert (result.status, result.details) == ("ok", {"installed": False})


@pytest.mark.parametrize(
    ("variables", "netrc", "status", "message"),
    [
        ({}, "", "warning", NONE), ({"WANDB_MODE": "offline"}, "", "ok", "offline"),
        ({"WANDB_MODE": "dryrun"}, "", "ok", "offline"),
        ({"WANDB_MODE": "disabled"}, "", "ok", "disabled"),
        ({"WANDB_DISABLED": "true"}, "", "ok", "disabled"),
        ({"WANDB_MODE": "online"}, "", "error", "WANDB_MODE=online, and there are no credentials"),
        ({"WANDB_API_KEY": KEY}, "", "ok", "with the credentials of WANDB_API_KEY"),
        ({}, NETRC, "ok", "/.netrc"),
        ({"WANDB_BASE_URL": "https://wandb.example.org"}, NETRC, "warning",
         "no credentials for https://wandb.example.org"),
    ],
)  # fmt: skip
def test_where_a_run_would_go(home, variables, netrc, status, message):
    if netrc:
        (home / ".netrc").write_text(netrc)
    result = wandb(5, {"HOME": str(home), **variables})
    assert result.status == status
    assert message in result.message
    assert KEY not in str(result)
    assert status == "ok" or "wandb login" in result.remedy
    assert result.details["mode"] in (message, "online", "offline")


def test_neither_wandb_nor_torch_is_imported(python):
    python(
        "import sys\nfrom ezpz_obs._checks import wandb\nwandb(5)\n"
        "assert not {'wandb', 'torch', 'numpy'} & set(sys.modules)"
    )
