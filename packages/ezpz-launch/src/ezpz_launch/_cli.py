"""The command ezpz-launch: from its words to its exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ezpz_topo import TopoError, Topology, detect, fold_nodelist, get_allocation

from ._environment import free_port
from ._errors import LaunchError, UsageError, discard, say
from ._identify import choose_launcher, imagine_launcher, outside_of_launch, require_command
from ._launchers import argv as argv_of
from ._launchers import hostfile_of, needs_hostfile
from ._options import OPTIONS, Request, request_of, split
from ._plan import LaunchPlan, explain, explain_json, plan
from ._version import __version__

if TYPE_CHECKING:
    from ._stage import Alone

HOSTFILE = "HOSTFILE"
"""Stands in a dry run for the file that a launch would write."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ezpz-launch`` with these words (default: the process's) and return its exit status."""
    try:
        return _main(sys.argv[1:] if argv is None else argv, os.environ)
    except (LaunchError, TopoError) as error:
        say(str(error))
        return getattr(error, "exit_status", UsageError.exit_status)
    except KeyboardInterrupt:
        return 130


def console() -> None:
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # no one reads it
            if stream is not None:  # it was closed when we started
                stream.flush()
    os._exit(status)  # to take a process's modules apart takes 6 to 20 ms


def _main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    if argv[:1] == ["history"]:
        from ._record import command as history  # noqa: PLC0415  # only this needs it

        return _print(history(argv[1:], env))
    if argv[:1] == ["stage"]:
        from ._stage import Alone  # noqa: PLC0415  # only this needs it

        alone = Alone.of(argv[1:])
        if alone.page:
            return _print(alone.page)
        return _start(request_of(alone.options, (sys.executable,)), env, alone)
    options, command = split(argv)
    if "help" in options:
        return _print(help_page())
    if "version" in options:
        return _print(__version__)
    return _start(request_of(options, command), env)


def _start(request: Request, env: Mapping[str, str], alone: Alone | None = None) -> int:
    """Start a launch, or explain it; or only stage, for what starts later."""
    if request.dry_run and request.machine:
        if request.hostfile:
            why = "its hosts are hypothetical; expected no --hostfile"
            raise UsageError(f"--dry-run --machine: {why}")
        from ezpz_topo import imagine  # noqa: PLC0415  # only a dry run needs it

        topology = imagine(request.machine, request.nodes or 1, env)
        return _print(_explained(_planned(topology, request, {}, is_here=False)))
    try:
        os.getcwd()
    except OSError as error:
        # Each rank's shell would complain of it.
        raise UsageError(
            f"the current directory cannot be read ({error.strerror}); expected one that is "
            "there; it was deleted, perhaps: cd to another"
        ) from error
    topology = detect({**env, "EZPZ_MACHINE": request.machine} if request.machine else env)
    rank = topology.rank
    if rank.world_size > 1 and not request.nested:
        raise UsageError(
            f"this process is rank {rank.rank} of {rank.world_size} already "
            f"({rank.sources['rank']}); expected to be started outside of a launch; --nested lets "
            f"every rank launch on its own host; unset {rank.sources['rank']} if it is left over"
        )
    if rank.launcher != "none":
        # Also of a world of one: an inner MPI would join it.
        env = outside_of_launch(env)
    require_command(request.command[0], {**env, **dict(pair.split("=", 1) for pair in request.env)})
    planned = _planned(topology, request, env)
    _hint_at_a_job(topology, request, env)
    staging = None
    if request.stage:
        from ._stage import prepare  # noqa: PLC0415  # few launches need it

        staging = prepare(planned, env, lambda other: _planned(topology, other, env), alone)
        planned = staging.planned
    if request.dry_run:
        return _print(_explained(planned))
    if staging and alone:
        return _print(staging.question(alone.question)) if alone.question else staging.alone()
    from ._retry import Attempts  # noqa: PLC0415  # a dry run does without

    return Attempts(planned, topology, env, staging).run()


def _planned(
    topology: Topology, request: Request, env: Mapping[str, str], *, is_here: bool = True
) -> LaunchPlan:
    """Plan a launch from here, or on a machine that this is not."""
    job, beside = topology.allocation, os.path.dirname(sys.executable)
    hosts: Sequence[str] = job.hosts
    source, slots = job.sources["hosts"], job.slots or [0] * len(hosts)
    if request.hostfile or env.get("HOSTFILE"):
        from ezpz_topo import get_hosts  # noqa: PLC0415  # 4 ms

        found = get_hosts(request.hostfile or None, env)
        hosts, source = [entry.host for entry in found.entries], found.source
        slots = [entry.slots or 0 for entry in found.entries]
    elif request.nested and topology.rank.world_size > 1 and not request.include:
        # Every rank launches: each on its own host.
        hosts, slots = [job.node_name or topology.hostname], [0]
        source = "--nested: this host"

    chosen = partial(choose_launcher, topology=topology, request=request, env=env, beside=beside)
    return plan(
        topology, request, chosen if is_here else imagine_launcher(topology, request),
        hosts=hosts, hosts_source=source, slots=slots, hostfile=HOSTFILE,
        port=free_port() if is_here else 29500, user_env=env,
        as_root=is_here and os.geteuid() == 0,
    )  # fmt: skip


def _explained(planned: LaunchPlan) -> str:
    lines = hostfile_of(planned) if needs_hostfile(planned) else []
    return (explain_json if planned.request.json else explain)(planned, argv_of(planned), lines)


def _hint_at_a_job(topology: Topology, request: Request, env: Mapping[str, str]) -> None:
    """Name the job that this host is a node of, where this shell has none of its variables."""
    job, named = topology.allocation, request.hostfile or env.get("HOSTFILE")
    if job.scheduler != "none" or topology.rank.launcher != "none" or named:
        return
    # Where no daemon of a scheduler runs no one pays for a question to its server.
    for process in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with suppress(OSError), open(f"/proc/{process}/comm", "rb") as file:
            if file.read().strip() in (b"pbs_mom", b"slurmd"):
                break
    else:
        return
    try:
        found = get_allocation({"EZPZ_SCHEDULER_TIMEOUT": "3", **env}, ask=True)
    except TopoError:
        return  # it is a hint, and no more
    if found.job_id:
        how = f"export PBS_JOBID={found.job_id}"
        if found.scheduler == "slurm":
            how = f"srun --jobid={found.job_id} --overlap --pty bash"
        say(
            f"this host is a node of your job {found.job_id} ({fold_nodelist(found.hosts)}), whose "
            f"variables this shell does not have: this host alone is used; for the job's: {how}"
        )


def _print(text: str) -> int:
    if sys.stdout is None:
        return 0  # it was closed when we started
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        discard(sys.stdout.fileno())
        # `ezpz-launch --help | head -1` is no failure.
        if not isinstance(error, BrokenPipeError):
            raise LaunchError(f"cannot write to standard output: {error.strerror}") from error
    return 0


# The page that ``ezpz-launch --help`` prints.

USAGE = "ezpz-launch [OPTION...] [--] COMMAND [ARGUMENT...]"

EXAMPLES = (
    ("ezpz-launch python train.py --lr 1e-4", "one rank a device of this job, or host"),
    ("ezpz-launch -n 2 -m ezpz.examples.minimal", "two ranks of a module"),
    ("ezpz-launch --dry-run --machine aurora -N 4 python train.py", "what would be run, and why"),
    ("ezpz-launch --idle-timeout 10m --retries 3 python train.py", "stacks of a hang; start again"),
    ("ezpz-launch history", "the launches so far"),
)


def help_page() -> str:
    lines = [f"usage: {USAGE}", "", "Start COMMAND on every rank; its words are not touched.", ""]
    lines.append("options:")
    for option in OPTIONS:
        flags = ", ".join([*([f"-{option.short}"] if option.short else []), f"--{option.name}"])
        value = f"[={option.value}]" if option.bare else f" {option.value}".rstrip()
        lines.append(f"  {flags + value:<24} {option.help}")
    lines += ["", "examples:"]
    lines += [f"  {words:<59} {what}" for words, what in EXAMPLES]
    lines += [
        "",
        "exit status: 0; that of the first rank that failed (128 + signal if it was killed; 75:",
        "checkpointed, requeue); 2 usage; 124 hang; 126, 127 the command cannot be executed or",
        "found; 130 Ctrl-C; 143 SIGTERM.",
    ]
    return "\n".join(lines)
