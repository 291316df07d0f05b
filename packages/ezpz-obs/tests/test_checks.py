"""The check ``wandb`` of ``ezpz doctor``: no server is asked, and no library is imported."""

import sys

import pytest

from ezpz_obs import verify_wandb
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
    monkeypatch.setenv("HOME", str(tmp_path))
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
        ({"WANDB_DISABLED": "1", "WANDB_API_KEY": KEY}, "", "ok", "disabled"),
        ({"WANDB_MODE": "offline", "WANDB_API_KEY": KEY}, "", "ok", "offline"),
        ({"WANDB_MODE": "online"}, "", "error", "WANDB_MODE=online, and there are no credentials"),
        ({"WANDB_API_KEY": KEY}, "", "ok", "with the credentials of WANDB_API_KEY"),
        ({"WANDB_DISABLED": "false", "WANDB_API_KEY": KEY}, "", "ok", "online"),
        ({"WANDB_API_KEY": " "}, "", "warning", NONE),
        ({"WANDB_IDENTITY_TOKEN_FILE": "/token"}, "", "ok", "of WANDB_IDENTITY_TOKEN_FILE"),
        ({}, NETRC, "ok", "/.netrc"), ({}, "machine api.wandb.ai login", "warning", NONE),
        ({"WANDB_BASE_URL": "https://w.org/"}, NETRC, "warning",
         "no credentials for https://w.org:"),
        ({"WANDB_BASE_URL": "https://w.org/"}, NETRC.replace("api.wandb.ai", "w.org"), "ok",
         "online: https://w.org, "),
    ],
)  # fmt: skip
def test_where_a_run_would_go(*, home, monkeypatch, variables, netrc, status, message):
    (home / ".netrc").write_text(netrc)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = wandb(5)
    assert result.status == status
    assert message in result.message
    assert KEY not in str(result)
    assert status == "ok" or "wandb login" in result.remedy
    assert result.details["mode"] in (message, "online", "offline")
    assert verify_wandb() is result.message.startswith("online: ")


def test_the_server_that_wandb_login_kept(home, monkeypatch):
    folder = home / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert wandb(5).details["server"] == "https://wandb.example.org"
    monkeypatch.setenv("WANDB_BASE_URL", "http://other/")
    assert wandb(5).details["server"] == "http://other"


def test_neither_wandb_nor_torch_is_imported(python):
    python(
        "import sys\nfrom ezpz_obs._checks import wandb\nwandb(5)\n"
        "assert not {'wandb', 'torch', 'numpy'} & set(sys.modules)"
    )
