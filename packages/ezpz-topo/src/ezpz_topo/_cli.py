"""The command ``ezpz-topo``: what is known of this process, its job and its host, and why."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence

from ._errors import TopoError, did_you_mean
from ._machine import known_machines
from ._nodelist import expand_nodelist, fold_nodelist
from ._topology import Topology, count_nodes, detect
from ._version import __version__

HELP = """\
usage: ezpz-topo [--json | --shell] [--ask]
       ezpz-topo expand NODELIST
       ezpz-topo fold [HOST...]
       ezpz-topo machines

Say who this process is, who else is there, on what machine, and where each answer comes from.

options:
  --json       the same for programs
  --shell      the job for a shell: eval "$(ezpz-topo --shell)" sets EZPZ_JOB (its id, or none),
               EZPZ_SCHEDULER, EZPZ_NODES, EZPZ_GPUS_PER_NODE and EZPZ_HOSTS (one a line)
  --ask        ask the scheduler (qstat, scontrol) what the variables do not tell: the
               walltime's end; the job of a shell that the job itself did not start
  -h, --help   this page
  --version    the version

examples:
  ezpz-topo                              a table of every value and its source
  ezpz-topo --json | python -m json.tool
  ezpz-topo expand 'nid[001-004,9]'      one host a line, in Slurm's order
  ezpz-topo fold nid001 nid002 nid003    nid[001-003]
  ezpz-topo fold < hosts.txt             the same, of a file with one host a line
  ezpz-topo machines                     the machines that are known, yours included
  mpiexec -n 2 ezpz-topo                 what each rank sees

exit status: 0; 2 bad input, or what was found is half set or contradicts itself; 1 it
could not be written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ezpz-topo`` with these words (default: the process's) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _print(_shell(words) if "--shell" in words else _answer(words))
    except TopoError as error:
        print(f"ezpz-topo: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # The interpreter's own flush at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            # `ezpz-topo expand ... | head -1` is no failure.
            return 0
        print(f"ezpz-topo: standard output: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _print(text: str) -> None:
    if sys.stdout is None:  # started with >&-
        raise UsageError("standard output is closed; expected somewhere to write to")
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _answer(words: list[str]) -> str:
    if {"-h", "--help"} & set(words):
        return HELP
    if words == ["--version"]:
        return __version__
    import fire  # noqa: PLC0415  # 50 ms, and only this command pays for it
    from fire.core import FireExit  # noqa: PLC0415

    said: list[str] = []

    def show(*, json: bool = False, ask: bool = False) -> None:
        for name, value in (("--json", json), ("--ask", ask)):
            if not isinstance(value, bool):
                raise UsageError(f"{name}={value}: expected no value")
        topology = detect(ask=ask or None)
        said.append(_json(topology) if json else _table(topology))

    def expand(nodelist: str) -> None:
        said.append("\n".join(_some(expand_nodelist(nodelist))))

    def fold(*hosts: str) -> None:
        said.append(fold_nodelist(_some(hosts or _hosts_of_stdin())))

    def machines() -> None:
        said.append(_machines())

    # Host names are text, also those that look like numbers or lists. The commands return
    # nothing, so that Fire has no member to look the words that are left over up in.
    commands: dict[str, Callable[..., None]] = {
        "expand": fire.decorators.SetParseFns(nodelist=str)(expand),
        "fold": fire.decorators.SetParseFn(str)(fold),
        "machines": machines,
    }
    _refuse_unknown(words, commands)
    named = bool(words) and words[0] in commands
    command, rest = (commands[words[0]], words[1:]) if named else (show, words)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            fire.Fire(command, command=rest, name="ezpz-topo")
    except FireExit as error:
        # Below its own line Fire has a page of usage.
        first = next((line for line in complaint.getvalue().splitlines() if line.strip()), "")
        raise UsageError(
            f"{' '.join(words)!r}: {first.removeprefix('ERROR: ') or 'not understood'}; expected "
            "one of the forms of ezpz-topo --help"
        ) from error
    return said[0]


def _refuse_unknown(words: Sequence[str], commands: Iterable[str]) -> None:
    # Fire's own flags come after --, and - separates its commands; no host begins so either.
    for word in words:
        if word.startswith("-") and word not in ("--json", "--ask"):
            hint = did_you_mean(word, ("--json", "--ask", "--shell", "--help", "--version"))
            raise UsageError(f"unknown option {word!r}; {hint or 'see ezpz-topo --help'}")
    if words and not words[0].startswith("-") and words[0] not in commands:
        hint = did_you_mean(words[0], commands)
        raise UsageError(f"unknown command {words[0]!r}; {hint or 'see ezpz-topo --help'}")


def _some(hosts: Sequence[str]) -> Sequence[str]:
    if not hosts:
        raise UsageError("no host; expected one at least; see ezpz-topo --help")
    return hosts


def _hosts_of_stdin() -> list[str]:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            "fold: no hosts; expected them as arguments, or one a line on standard input: "
            "ezpz-topo fold nid001 nid002"
        )
    return sys.stdin.read().split()


def _table(topology: Topology) -> str:
    rows = [(name, _text(value), source) for name, value, source in topology.explain()]
    names = max(len(name) for name, _, _ in rows)
    # One long value (the hosts) must not push every source off the screen.
    values = max((len(value) for _, value, _ in rows if len(value) <= 40), default=0)
    lines = [
        _wrapped(f"{name:<{names}}  {value:<{values}}  ", source) for name, value, source in rows
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in topology.notes)])


def _wrapped(start: str, text: str) -> str:
    """Return a row whose last column stays below itself on a terminal; elsewhere it is one line."""
    if sys.stdout is None or not sys.stdout.isatty():
        return f"{start}{text}".rstrip()
    import shutil  # noqa: PLC0415 - only a terminal needs them
    import textwrap  # noqa: PLC0415

    width = max(shutil.get_terminal_size().columns, len(start) + 20)
    return textwrap.fill(
        text, width, initial_indent=start, subsequent_indent=" " * len(start),
        break_on_hyphens=False, break_long_words=False,
    ) or start.rstrip()  # fmt: skip


def _json(topology: Topology) -> str:
    import json  # noqa: PLC0415

    facts = {
        name.replace(" ", "_"): {"value": value, "source": source}
        for name, value, source in topology.explain()
    }
    return json.dumps({**facts, "notes": list(topology.notes)}, indent=2)


def _shell(words: Sequence[str]) -> str:
    import shlex  # noqa: PLC0415

    if set(words) - {"--shell", "--ask"}:
        raise UsageError(f"{' '.join(words)!r}: expected --shell alone or with --ask")
    topology = detect(ask="--ask" in words or None)
    job = topology.allocation
    facts = {
        "JOB": job.job_id or "none",
        "SCHEDULER": job.scheduler,
        "NODES": count_nodes(topology.rank, job)[0],
        "GPUS_PER_NODE": topology.accelerators.count,
        "HOSTS": "localhost" if job.scheduler == "none" else "\n".join(job.hosts),
    }
    return "\n".join(f"EZPZ_{name}={shlex.quote(str(value))}" for name, value in facts.items())


def _machines() -> str:
    rows = [("machine", "site", "scheduler", "launcher", "devices", "file")]
    for machine in known_machines().values():
        devices = "as found" if machine.devices_per_node is None else f"{machine.devices_per_node}"
        kind = f" {machine.device_type}" if machine.device_type else ""
        rows.append(
            (machine.name, machine.site, machine.scheduler, machine.launcher, devices + kind,
             machine.path)
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _text(value: object) -> str:
    if value is None:
        return "unknown"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


class UsageError(TopoError):
    """The words of the command line make no sense."""
