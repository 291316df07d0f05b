"""The command ezpz-launch: from its words to its exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from ezpz_launch._errors import LaunchError, UsageError, discard, open_closed_streams, say
from ezpz_launch._plan.launchers import argv as argv_of
from ezpz_launch._plan.launchers import (
    beside_python,
    choose_launcher,
    hostfile_of,
    imagine_launcher,
    needs_hostfile,
    outside_of_launch,
    require_command,
    require_program,
)
from ezpz_launch._plan.options import OPTIONS, Request, help_row, request_of, split
from ezpz_launch._plan.plan import LaunchPlan, explain, explain_json, free_port, plan
from ezpz_launch._version import __version__
from ezpz_topo import TopoError, Topology, detect, fold_nodelist, get_allocation, get_hosts, imagine

if TYPE_CHECKING:
    from ezpz_launch._nodes.attempts import Attempts
    from ezpz_launch._nodes.stage import Staging

COMMANDS = {
    "launches": "_job.jobs:launches",
    "nodes": "_nodes.bad_nodes:command",
    "preflight": "_cli:preflight",
    "stage": "_cli:stage",
    "submit": "_job.submit:command",
    "jobs": "_job.jobs:jobs",
    "follow": "_job.jobs:follow",
    "kill": "_job.jobs:kill",
}
"""What may stand in a command's place: who has it, called with the words behind it and the
environment; it returns what is to be printed, or the exit status."""

HOSTFILE = "HOSTFILE"  # stands in a dry run for the file that a launch would write


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ezpz-launch`` with these words (default: the process's) and return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    open_closed_streams()
    try:
        return _main(words, os.environ)
    except (LaunchError, TopoError) as error:
        # The option that was given, not the variable behind it, unless that is what is wrong.
        variable = f"EZPZ_MACHINE={os.environ.get('EZPZ_MACHINE')}:"
        text = str(error)
        say(text if variable in text else text.replace("EZPZ_MACHINE=", "--machine "))
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
    if argv[:1] and argv[0] in COMMANDS:
        module, function = COMMANDS[argv[0]].split(":")
        command = getattr(import_module(f".{module}", __package__), function)
        told: str | int = command(argv[1:], env)
        return told if isinstance(told, int) else _print(told)
    options, command = split(argv)
    if "help" in options or "version" in options:
        return _print(help_page() if "help" in options else __version__)
    request: Request = request_of(options, command)
    require_program(request.command)
    if request.dry_run and request.machine:
        if request.hostfile:
            why = "its hosts are hypothetical; expected no --hostfile"
            raise UsageError(f"--dry-run --machine: {why}")
        topology = imagine(request.machine, (request.nodes or 1) + request.spares, env)
        return _print(_explained(_planned(topology, request, {}, is_here=False)))
    if env.get("EZPZ_CHAIN") and not request.dry_run:
        from ezpz_launch._job.chain import CHAIN, see_through  # noqa: PLC0415  # only a submitted job needs it

        own = {name: value for name, value in env.items() if name != CHAIN}
        return see_through(env, lambda *before: _prepared(request, own, *before))
    if request.dry_run:
        planned, topology, env = _looked_at(request, env)
        planned = _staging(planned, topology, env).planned if request.stage else planned
        return _print(_explained(planned))
    return _prepared(request, env).run()


def _prepared(
    request: Request, env: Mapping[str, str], before: int = 0, progress_file: str = ""
) -> Attempts:
    """Return a launch that is ready to run; attempts of earlier jobs count before its own."""
    from ezpz_launch._nodes.attempts import Attempts  # noqa: PLC0415  # a dry run does without

    planned, topology, own = _looked_at(request, env)
    if sys.stdout is None and not request.log_dir:
        say(
            "standard output is closed: what the ranks write there is lost; expected somewhere to "
            "write to, or --log-dir DIR; to want none of it: >/dev/null"
        )
    return Attempts(
        planned, topology, own, before, progress_file,
        replan=partial(_replanned, topology, request, own),
        prepare=(lambda ready: _staging(ready, topology, own)) if request.stage else None,
    )  # fmt: skip


def _looked_at(
    request: Request, env: Mapping[str, str]
) -> tuple[LaunchPlan, Topology, Mapping[str, str]]:
    """Look where we are, and plan: the plan, the topology, and the environment for the ranks."""
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
    if request.preflight and not request.dry_run:
        from ezpz_launch._nodes.preflight import leave_out  # noqa: PLC0415  # only this option needs it

        if leave_out(planned, topology.allocation, env):
            planned = _planned(topology, request, env)
    _hint_at_a_job(topology, request, env)
    return planned, topology, env


def preflight(argv: Sequence[str], env: Mapping[str, str]) -> str | int:
    """Do ``ezpz preflight``: what ``--preflight`` does before a launch, without one."""
    from ezpz_launch._nodes.preflight import command  # noqa: PLC0415  # only this needs it

    def plan_of(request: Request) -> tuple[LaunchPlan, Mapping[str, str]]:
        # Nodes that were found bad are looked at as well.
        planned, _, own = _looked_at(request, {**env, "EZPZ_STATE_DIR": os.devnull})
        return planned, own

    return command(argv, plan_of)


def stage(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Do ``ezpz stage``: what ``--stage`` does before a launch, without one."""
    from ezpz_launch._nodes.stage import PAGE, Staging, python_of, read_words  # noqa: PLC0415  # only this needs it

    options, folder = read_words(argv)
    if "help" in options:
        return _print(PAGE)
    asked = [name for name in ("status", "clean") if options.pop(name, False)]
    request: Request = request_of(options, (sys.executable,))
    planned, topology, own = _looked_at(request, env)
    replan = partial(_planned_on, planned.placement.hosts, topology, own)
    staging = Staging(planned, own, replan, folder and python_of(folder))
    if request.dry_run:
        return _print(_explained(staging.planned))
    return _print(staging.question(asked[-1])) if asked else staging.alone()


def _staging(planned: LaunchPlan, topology: Topology, env: Mapping[str, str]) -> Staging:
    from ezpz_launch._nodes.stage import prepare  # noqa: PLC0415  # few launches need it

    return prepare(planned, env, partial(_planned_on, planned.placement.hosts, topology, env))


def _planned(
    topology: Topology, request: Request, env: Mapping[str, str], *, is_here: bool = True,
    only: Sequence[str] = (),
) -> LaunchPlan:  # fmt: skip
    """Plan a launch from here, on these hosts only if there are any, or on an absent machine."""
    job = topology.allocation
    hosts: Sequence[str] = job.hosts
    source, slots = job.sources["hosts"], job.slots or [0] * len(hosts)
    if request.hostfile or env.get("HOSTFILE"):
        found = get_hosts(request.hostfile or None, env)
        hosts, source = [entry.host for entry in found.entries], found.source
        slots = [entry.slots or 0 for entry in found.entries]
    elif request.nested and topology.rank.world_size > 1 and not request.include:
        # Every rank launches: each on its own host.
        hosts, slots = [job.node_name or topology.hostname], [0]
        source = "--nested: this host"
    notes, spares = list[str](), request.spares
    if only:
        of_each = dict(zip(hosts, slots, strict=True))
        hosts, slots = only, [of_each.get(host, 0) for host in only]
    elif is_here:
        from ezpz_launch._nodes.bad_nodes import allocation_of, avoid  # noqa: PLC0415  # what was found bad

        bad, notes = avoid(hosts, request, allocation_of(job, request, env), env)
        if bad:
            kept = [(host, n) for host, n in zip(hosts, slots, strict=True) if host not in bad]
            hosts, slots = [host for host, _ in kept], [n for _, n in kept]
            source += f", less {len(bad)} found bad"
            spares = max(0, request.spares - len(bad))

    found_in = beside_python(env)
    chosen = partial(choose_launcher, topology=topology, request=request, env=found_in)
    asked = replace(request, spares=spares)
    planned = plan(
        topology, asked, chosen if is_here else imagine_launcher(topology, request),
        hosts=hosts, hosts_source=source, slots=slots, hostfile=HOSTFILE,
        port=free_port() if is_here else 29500, user_env=env,
        as_root=is_here and os.geteuid() == 0,
    )  # fmt: skip
    return replace(planned, request=request, warnings=(*planned.warnings, *notes))


def _planned_on(
    hosts: Sequence[str], topology: Topology, env: Mapping[str, str], request: Request
) -> LaunchPlan:
    """Plan a launch on these hosts, which are all to be used."""
    every = replace(request, include="", exclude="", nodes=None, spares=0, min_nodes=None)
    return _planned(topology, every, env, only=hosts)


def _replanned(
    topology: Topology, request: Request, env: Mapping[str, str],
    hosts: Sequence[str], size: tuple[int, int],
) -> LaunchPlan:  # fmt: skip
    """Plan the same launch on these hosts, with so many ranks, so many on a host."""
    sized = replace(request, nproc=size[0], ppn=size[1])
    return replace(_planned_on(hosts, topology, env, sized), request=request)


def _explained(planned: LaunchPlan) -> str:
    lines = hostfile_of(planned) if needs_hostfile(planned) else []
    if planned.request.json:
        return explain_json(planned, argv_of(planned), lines)
    columns = os.get_terminal_size(1).columns if os.isatty(1) else 0
    return explain(planned, argv_of(planned), lines, columns)


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
    ("ezpz-launch python train.py --lr 1e-4", "one rank a device"),
    ("ezpz-launch -n 2 -m ezpz.examples.minimal", "two ranks of a module"),
    ("ezpz-launch --dry-run --machine aurora python train.py", "what would run, and why"),
    ("ezpz-launch --idle-timeout 10m python train.py", "end a hang, with stacks"),
    ("ezpz-launch --spares 2 --retries 5 python train.py", "replace a bad host"),
)


def help_page() -> str:
    also = " ".join(option.also.split()[0] for option in OPTIONS if option.also)
    lines = [f"usage: {USAGE}", "", "Start COMMAND as it is on every rank.", "", "options:"]
    for option in OPTIONS:
        flags = ", ".join([*([f"-{option.short}"] if option.short else []), f"--{option.name}"])
        value = f"[={option.value}]" if option.implied else f" {option.value}".rstrip()
        lines.append(help_row(flags + value, 20, option.help))
    lines += [f"  also understood: {also}", "", "examples:"]
    lines += [f"  {words:<54} {what}" for words, what in EXAMPLES]
    lines += [
        "",
        "instead of a command, each with --help:",
        f"  {', '.join(COMMANDS)}",
        "",
        "exit status: 0; that of the first rank that failed (128 + signal if it was",
        "killed; 75: checkpointed, requeue); 2 usage; 124 hang; 126, 127 the command",
        "cannot be executed or found; 130 Ctrl-C; 143 SIGTERM.",
    ]
    return "\n".join(lines)
