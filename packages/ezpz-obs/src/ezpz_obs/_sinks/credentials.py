"""Whether W&B is wanted, and whether it knows who we are; without importing it."""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

Mode = Literal["online", "offline", "disabled", "shared"]

_PUBLIC = "https://api.wandb.ai"
_NO = frozenset({"", "0", "false", "no", "off", "f", "n"})


def find_mode(env: Mapping[str, str] | None = None) -> Mode:
    """Return how W&B is to run: without credentials offline, never asking for them.

    ``WANDB_DISABLED`` and ``WANDB_MODE`` are heeded as W&B does.
    """
    env = os.environ if env is None else env
    said = env.get("WANDB_MODE", "").strip().lower()
    if env.get("WANDB_DISABLED", "").strip().lower() not in _NO or said == "disabled":
        return "disabled"
    if said in ("offline", "dryrun") or not find_credentials(env):
        return "offline"
    return "shared" if said == "shared" else "online"


def find_credentials(env: Mapping[str, str] | None = None) -> str | None:
    """Return where credentials for W&B's server are: a variable's name or a file; None: nowhere."""
    env = os.environ if env is None else env
    for variable in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        if env.get(variable, "").strip():
            return variable
    path = _netrc(env)
    return str(path) if path and _entry(path, env) else None


def find_key(env: Mapping[str, str] | None = None) -> str | None:
    """Return the API key itself, where there is one."""
    env = os.environ if env is None else env
    key = env.get("WANDB_API_KEY", "").strip()
    if key:
        return key
    path = _netrc(env)
    return _entry(path, env) if path else None


def find_server(env: Mapping[str, str] | None = None) -> str:
    """Return the address of W&B's server: ``WANDB_BASE_URL``, or what ``wandb login`` kept."""
    env = os.environ if env is None else env
    if url := env.get("WANDB_BASE_URL", "").strip():
        return url.rstrip("/")
    config = env.get("WANDB_CONFIG_DIR") or os.path.join(_home(env), ".config", "wandb")
    for path in (Path("wandb", "settings"), Path(config, "settings")):
        parser = configparser.ConfigParser()
        try:
            parser.read(path)
            url = parser.get("default", "base_url", fallback="")
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # W&B says so itself when it starts
        if url:
            return url.rstrip("/")
    return _PUBLIC


def _home(env: Mapping[str, str]) -> str:
    return env.get("HOME") or os.path.expanduser("~")


def _netrc(env: Mapping[str, str]) -> Path | None:
    named = env.get("NETRC")
    paths = [Path(named)] if named else [Path(_home(env), name) for name in (".netrc", "_netrc")]
    return next((path for path in paths if path.is_file()), None)


def _entry(path: Path, env: Mapping[str, str]) -> str | None:
    try:
        found = netrc.netrc(str(path)).authenticators(urlsplit(find_server(env)).netloc)
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
        return None
    return found[2] if found and found[2] else None
