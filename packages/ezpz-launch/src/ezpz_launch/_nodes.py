"""Nodes that failed: what takes their place, the memory of them, and `ezpz-launch nodes`."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ezpz_topo import Allocation, TopoError, ask, fold_nodelist, get_pbs_folder, same_host

from ._errors import LaunchError, UsageError, say
from ._record import dump, iso_time, make_folder, records_folder, write

if TYPE_CHECKING:
    from ._options import Request
    from ._plan import LaunchPlan

# The hosts of one launch, from attempt to attempt.

_SWEPT = 10  # seconds of silence after which a host where something is to be ended is given up

Replan = Callable[[Sequence[str], tuple[int, int]], "LaunchPlan"]
"""Plan the same launch on these hosts, with so many ranks, so many on a host."""


class Pool:
    """The hosts that a launch keeps aside."""

    def __init__(self, planned: LaunchPlan, replan: Replan | None) -> None:
        self._spares, self._replan = list(planned.spares), replan
        self._least = planned.request.min_nodes
        self.replaces = replan is not None and (bool(self._spares) or self._least is not None)
        """Whether it was asked to go on without a host that failed."""

    def without(self, bad: Sequence[str], planned: LaunchPlan) -> tuple[LaunchPlan | None, str]:
        """Return the plan without these hosts, None where too few are left; and what was done."""
        self._spares = [host for host in self._spares if host not in bad]
        hosts, done = list(planned.placement.hosts), list[str]()
        for index, host in enumerate(hosts):
            if host in bad and self._spares:
                # The others keep their places, and what they hold.
                hosts[index] = self._spares.pop(0)
                done.append(f"{hosts[index]} takes the place of {host}")
        left, ppn = [host for host in hosts if host not in bad], planned.placement.ppn
        if len(left) < len(hosts):
            if self._replan is None or len(left) < (self._least or len(hosts)) or not left:
                return None, "no spare host is left"
            done.append(f"it goes on with {len(left)} hosts (--min-nodes)")
        if self._replan is None or not done:
            return None, "it is not among the hosts of this launch"
        again = self._replan(left, (min(planned.nproc, ppn * len(left)), ppn))
        return again, ", ".join(done)


def sweep(
    hosts: Sequence[str], launch_id: str, planned: LaunchPlan, env: Mapping[str, str]
) -> Callable[[], object]:
    """End what a launch left on hosts where its agent is gone: by a small launch, in background.

    Return what waits for its end.
    """
    import subprocess  # noqa: PLC0415 - only this needs it

    request, count = planned.request, str(len(hosts))
    words = ["--launcher", planned.launcher.kind, "-n", count, "--ppn", "1", "--grace", "1"]
    words += ["--include", fold_nodelist(hosts), "--idle-timeout", str(_SWEPT)]
    words += ["--hostfile", request.hostfile] if request.hostfile else []
    if request.launcher_args:
        words += ["--launcher-args", shlex.join(request.launcher_args)]
    agent = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_agent.py")
    words += ["--", sys.executable, "-I", "-S", agent, "--end", launch_id]
    null = subprocess.DEVNULL
    # It is no launch of the user's: no record of it is kept.
    begun = subprocess.Popen(
        [sys.executable, "-m", "ezpz_launch", *words], stdin=null, stdout=null, stderr=null,
        env={**env, "EZPZ_STATE_DIR": os.devnull}, start_new_session=True,
    )  # fmt: skip

    def wait() -> None:
        with suppress(subprocess.TimeoutExpired):
            begun.wait(_SWEPT)

    return wait


def warn_of_the_scheduler(job: Allocation, env: Mapping[str, str]) -> None:
    """Say that the scheduler would end the job with a node, where it tells so."""
    if job.scheduler == "slurm" and "SLURM_NO_KILL" not in env:
        # Of a running job Slurm 22.05 does not tell it.
        say(
            "--spares, --min-nodes: Slurm ends a job that loses a node, unless it was submitted "
            "with --no-kill; export SLURM_NO_KILL=set there, and this line goes"
        )
    if job.scheduler == "pbs" and job.job_id:
        words, place = ["qstat", "-f", job.job_id], get_pbs_folder(env)
        try:
            told = ask(words, env=env, attempts=1, time_limit=3, place=place).stdout
        except TopoError:
            return  # it is a hint, and no more
        found = re.search(r"tolerate_node_failures = (\w+)", told)
        if found is None or found[1] != "all":
            say(
                f"--spares, --min-nodes: job {job.job_id} has tolerate_node_failures="
                f"{found[1] if found else 'none'}; expected all, or PBS ends it with its first "
                "lost node; submit with -W tolerate_node_failures=all"
            )


# The memory: one small file a node, in the user's state folder.

_KEPT = 24 * 3600.0
"""Seconds for which a node is remembered: sites mend or reboot theirs within a day."""


class Bad(NamedTuple):
    """A node that was found bad; the fields of the file."""

    host: str
    why: str
    when: float  # seconds since 1970
    allocation: str  # the job's id, or the hostfile's path


def allocation_of(job: Allocation, request: Request, env: Mapping[str, str]) -> str:
    hostfile = request.hostfile or env.get("HOSTFILE", "")
    return job.job_id or (os.path.abspath(hostfile) if hostfile else "")


def _path(host: str, env: Mapping[str, str]) -> str:
    return os.path.join(records_folder(env, "nodes"), f"{host.replace('/', '_')}.json")


def remember(hosts: Sequence[str], why: str, allocation: str, env: Mapping[str, str]) -> None:
    try:
        make_folder(records_folder(env, "nodes"))
        for host in hosts:
            bad = Bad(host, why, time.time(), allocation)
            write(_path(host, env), dump(bad._asdict()))
    except (OSError, LaunchError) as error:
        say(f"{', '.join(hosts)} cannot be remembered as bad: {error}")


def forget(hosts: Sequence[str], env: Mapping[str, str]) -> None:
    for host in hosts:
        with suppress(FileNotFoundError, NotADirectoryError, LaunchError):  # it is not there
            os.unlink(_path(host, env))


def recall(env: Mapping[str, str]) -> list[Bad]:
    """Return the nodes that were found bad, the oldest first; those of yesterday are forgotten."""
    import json  # noqa: PLC0415 - as above

    found = []
    try:
        names = os.listdir(folder := records_folder(env, "nodes"))
    except (OSError, LaunchError):
        return []
    for name in names:
        path = os.path.join(folder, name)
        with suppress(OSError, ValueError, TypeError):  # another's, or half of a file
            with open(path, encoding="utf-8") as file:
                bad = Bad(**json.load(file))
            if time.time() - bad.when > _KEPT:
                os.unlink(path)
            else:
                found.append(bad)
    return sorted(found, key=lambda each: each.when)


def avoid(
    hosts: Sequence[str], request: Request, allocation: str, env: Mapping[str, str]
) -> tuple[set[str], list[str]]:
    """Return which hosts a launch leaves out, found bad in this allocation; and what to say."""
    found = [(host, bad) for bad in recall(env) for host in hosts if same_host(host, bad.host)]
    if not found or request.include:
        return set(), []
    bad = {host for host, each in found if allocation and each.allocation == allocation}
    needed = request.nodes or 0
    if request.nproc and request.ppn:
        needed = max(needed, -(-request.nproc // request.ppn))
    if len(hosts) - len(bad) < max(1, needed):
        bad = set()  # there are no others
    notes = []
    for host, each in found:
        what = "is left out" if host in bad else "is used"
        ago = f"{(time.time() - each.when) / 3600:.1f} h ago"
        notes.append(
            f"{host} {what}: it was found bad {ago} ({each.why}); "
            f"to forget it: ezpz-launch nodes forget {host}"
        )
    return bad, notes


# `ezpz-launch nodes`.

USAGE = "ezpz-launch nodes [--json] | nodes forget HOST...|--all"

PAGE = f"""\
usage: {USAGE}

The nodes that launches of the last 24 hours found bad: later launches of the same job leave them
out, others say so.

examples:
  ezpz-launch nodes                 a table: host, when, job, why
  ezpz-launch nodes forget nid003   it is as good as any other again"""


def command(argv: Sequence[str], env: Mapping[str, str]) -> str:
    found = recall(env)
    match list(argv):
        case ["-h" | "--help"]:
            return PAGE
        case ["--json"]:
            import json  # noqa: PLC0415 - as above

            return json.dumps([bad._asdict() for bad in found], indent=1)
        case ["forget", _, *_] as words:
            named = [bad for bad in found if words[1:] == ["--all"] or bad.host in words[1:]]
            unknown = set(words[1:]) - {"--all"} - {bad.host for bad in found}
            if unknown:
                known = ", ".join(bad.host for bad in found) or "none"
                raise UsageError(f"nodes forget {min(unknown)}: expected one of: {known}")
            for bad in named:
                with suppress(FileNotFoundError):  # somebody was quicker
                    os.unlink(
                        os.path.join(
                            records_folder(env, "nodes"), f"{bad.host.replace('/', '_')}.json"
                        )
                    )
            return f"forgotten: {', '.join(bad.host for bad in named) or 'none'}"
        case []:
            if not found:
                return "no node was found bad within the last 24 hours"
            width = max(len(bad.host) for bad in found)
            return "\n".join(
                f"{host:<{width}}  {iso_time(when)[:16]}Z  {allocation or '-'}  {why}"
                for host, why, when, allocation in found
            )
    raise UsageError(f"nodes: {' '.join(argv)!r} is not known here; expected {USAGE}")
