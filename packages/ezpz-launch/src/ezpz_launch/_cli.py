"""The command ezpz-launch: from its words to its exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from ezpz_launch._errors import LaunchError, UsageError, discard, open_closed_streams, say
from ezpz_launch._plan.command import require_program
from ezpz_launch._plan.context import (
    Context,
    find_context,
    imagine_context,
    make_plan,
    plan_on_hosts,
    replan,
    warn_if_job_env_missing,
)
from ezpz_launch._plan.explain import explain, explain_json
from ezpz_launch._plan.launchers import build_argv, build_hostfile, needs_hostfile
from ezpz_launch._plan.options import OPTIONS, Request, build_request, format_help_row, split
from ezpz_launch._plan.plan import LaunchPlan
from ezpz_launch._version import __version__
from ezpz_topo import TopoError

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
        return _run_command(argv[0], argv[1:], env)
    options, words = split(argv)
    if "help" in options:
        return _print(help_page())
    if "version" in options:
        return _print(__version__)
    request: Request = build_request(options, words)
    require_program(request.command)
    if request.dry_run:
        return _print(_explain(_plan_dry_run(request, env)))
    if env.get("EZPZ_CHAIN"):
        from ._job.chain import CHAIN, see_through  # noqa: PLC0415  # only a submitted job needs it

        own = {name: value for name, value in env.items() if name != CHAIN}
        return see_through(env, lambda *before: _build_attempts(request, own, *before))
    return _build_attempts(request, env).run()


def _run_command(name: str, words: Sequence[str], env: Mapping[str, str]) -> int:
    """Run what stands in a command's place; print what it returns, unless it is a status."""
    module, function = COMMANDS[name].split(":")
    command = getattr(import_module(f".{module}", __package__), function)
    result: str | int = command(words, env)
    if isinstance(result, int):
        return result
    return _print(result)


def _plan_dry_run(request: Request, env: Mapping[str, str]) -> LaunchPlan:
    if request.machine:
        return make_plan(imagine_context(request, env), request)
    context = find_context(request, env)
    planned = _plan_without_bad_hosts(context, request)
    warn_if_job_env_missing(context, request)
    if request.stage:
        planned = _prepare_staging(context, planned).planned
    return planned


def _build_attempts(
    request: Request, env: Mapping[str, str], before: int = 0, progress_file: str = ""
) -> Attempts:
    """Return a launch that is ready to run; attempts of earlier jobs count before its own."""
    from ._nodes.attempts import Attempts  # noqa: PLC0415  # a dry run does without

    context = find_context(request, env)
    planned = _plan_without_bad_hosts(context, request)
    if request.preflight:
        from ._nodes.preflight import leave_out  # noqa: PLC0415  # only this option needs it

        if leave_out(planned, context.topology.allocation, context.env):
            planned = _plan_without_bad_hosts(context, request)
    warn_if_job_env_missing(context, request)
    if sys.stdout is None and not request.log_dir:
        say(
            "standard output is closed: what the ranks write there is lost; expected somewhere to "
            "write to, or --log-dir DIR; to want none of it: >/dev/null"
        )
    prepare = None
    if request.stage:
        prepare = partial(_prepare_staging, context)
    return Attempts(
        planned, context.topology, context.env, before, progress_file,
        replan=partial(replan, context, request), prepare=prepare,
    )  # fmt: skip


def _plan_without_bad_hosts(context: Context, request: Request) -> LaunchPlan:
    """Plan a launch that leaves out the hosts that were found bad in this allocation."""
    from ._nodes.bad_nodes import allocation_of, avoid  # noqa: PLC0415  # an imagined one has none

    allocation = allocation_of(context.topology.allocation, request, context.env)
    bad, notes = avoid(context.hosts, request, allocation, context.env)
    return make_plan(context, request, bad_hosts=bad, notes=notes)


def _prepare_staging(context: Context, planned: LaunchPlan) -> Staging:
    from ._nodes.stage import prepare  # noqa: PLC0415  # few launches need it

    return prepare(planned, context.env, partial(plan_on_hosts, context, planned.placement.hosts))


def preflight(argv: Sequence[str], env: Mapping[str, str]) -> str | int:
    """Do ``ezpz preflight``: what ``--preflight`` does before a launch, without one."""
    from ._nodes.preflight import command  # noqa: PLC0415  # only this needs it

    def plan_all_hosts(request: Request) -> tuple[LaunchPlan, Mapping[str, str]]:
        # Nodes that were found bad are looked at as well.
        context = find_context(request, env)
        warn_if_job_env_missing(context, request)
        return make_plan(context, request), {**context.env, "EZPZ_STATE_DIR": os.devnull}

    return command(argv, plan_all_hosts)


def stage(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Do ``ezpz stage``: what ``--stage`` does before a launch, without one."""
    from ._nodes.stage import (  # noqa: PLC0415  # only this needs it
        PAGE,
        Staging,
        python_of,
        read_words,
    )

    options, folder = read_words(argv)
    if "help" in options:
        return _print(PAGE)
    questions = [name for name in ("status", "clean") if options.pop(name, False)]
    request: Request = build_request(options, (sys.executable,))
    context = find_context(request, env)
    planned = _plan_without_bad_hosts(context, request)
    warn_if_job_env_missing(context, request)
    on_same_hosts = partial(plan_on_hosts, context, planned.placement.hosts)
    staging = Staging(planned, context.env, on_same_hosts, folder and python_of(folder))
    if request.dry_run:
        return _print(_explain(staging.planned))
    if questions:
        return _print(staging.question(questions[-1]))
    return staging.alone()


def _explain(planned: LaunchPlan) -> str:
    lines = build_hostfile(planned) if needs_hostfile(planned) else []
    if planned.request.json:
        return explain_json(planned, build_argv(planned), lines)
    columns = os.get_terminal_size(1).columns if os.isatty(1) else 0
    return explain(planned, build_argv(planned), lines, columns)


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
    also = " ".join(option.aliases.split()[0] for option in OPTIONS if option.aliases)
    lines = [f"usage: {USAGE}", "", "Start COMMAND as it is on every rank.", "", "options:"]
    for option in OPTIONS:
        flags = ", ".join([*([f"-{option.short}"] if option.short else []), f"--{option.name}"])
        value = f"[={option.value}]" if option.bare_value else f" {option.value}".rstrip()
        lines.append(format_help_row(flags + value, 20, option.help))
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
