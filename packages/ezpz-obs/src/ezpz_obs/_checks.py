"""The check ``wandb``: credentials, or offline; without the server or a prompt."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ezpz_topo import CheckResult

from ._errors import SinkError
from ._sinks.common import check_installed
from ._sinks.wandb import find_credentials, find_mode, find_server


def wandb(_seconds: float, env: Mapping[str, str] | None = None) -> CheckResult:
    """Return where a run of W&B would go, and whether that was requested."""
    if env is None:
        env = os.environ
    try:
        check_installed("wandb")
    except SinkError:
        return CheckResult.ok("not installed; History needs none", installed=False)
    mode = find_mode(env)
    server = find_server(env)
    where = find_credentials(env)
    facts = {"installed": True, "mode": mode, "server": server, "credentials": where}
    requested = env.get("WANDB_MODE", "").strip().lower()
    if mode == "disabled":
        return CheckResult.ok("disabled by WANDB_MODE or WANDB_DISABLED", **facts)
    if where is not None and mode != "offline":
        return CheckResult.ok(f"online: {server}, with the credentials of {where}", **facts)
    if requested in ("offline", "dryrun"):
        return CheckResult.ok(
            f"offline by WANDB_MODE={requested}: `wandb sync` sends runs", **facts
        )
    remedy = "wandb login (or set WANDB_API_KEY); to stay offline: export WANDB_MODE=offline"
    if requested in ("online", "shared"):
        return CheckResult.error(
            f"WANDB_MODE={requested}, and there are no credentials for {server}", remedy, **facts
        )
    return CheckResult.warning(
        f"no credentials for {server}: runs are kept offline, for `wandb sync`", remedy, **facts
    )
