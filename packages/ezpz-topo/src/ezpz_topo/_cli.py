"""The command ``ezpz-topo``: the facts on this process, its job and its host, with sources."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence

from ._errors import TopoError, did_you_mean
from ._machine import PACKAGED, known_machines
from ._nodelist import expand_nodelist, fold_nodelist
from ._topology import Topology, count_nodes, detect
from ._version import __version__

HELP = """\
usage: ezpz-topo [--json | --shell] [--ask]
       ezpz-topo expand NODELIST
       ezpz-topo fold [HOST...]
       ezpz-topo machines

Say who this process is, who else is there, on what machine, and where each
answer comes from.

options:
  --json       the same for programs
  --shell      the job for a shell: eval "$(ezpz-topo --shell)" sets EZPZ_JOB
               (its id, or none), EZPZ_SCHEDULER, EZPZ_NODES, EZPZ_GPUS_PER_NODE
               and EZPZ_HOSTS (one a line)
  --ask        ask the scheduler (qstat, scontrol) what the variables do not
               tell: the walltime's end; the job of a shell that is not its own
  -h, --help   this page
  --version    the version

examples:
  ezpz-topo                              a table of every value and its source
  ezpz-topo --json | python -m json.tool
  ezpz-topo expand 'nid[001-004,9]'      one host a line, in Slurm's order
  ezpz-topo fold nid001 nid002 nid003    nid[001-003]
  ezpz-topo fold < hosts.txt             the same, of a file, one host a line
  ezpz-topo machines                     those that are known, yours included
  mpiexec -n 2 ezpz-topo                 what each rank sees

exit status: 0; 2 bad input, or what was found is half set or contradicts
itself; 1 it could not be written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ezpz-topo`` with these words (default: the process's) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if "--shell" in words:
            _print(_format_shell(words))
        else:
            _print(_run_command(words))
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


def _run_command(words: list[str]) -> str:
    if {"-h", "--help"} & set(words):
        return HELP
    match words:
        case ["--version"]:
            return __version__
        case ["expand", nodelist] if nodelist[:1] != "-":
            return "\n".join(_require_hosts(expand_nodelist(nodelist)))
        case ["fold", *hosts] if not any(host[:1] == "-" for host in hosts):
            return fold_nodelist(_require_hosts(hosts or _read_hosts()))
        case ["machines"]:
            return _format_machines()
        case [*options] if {*options} <= {"--json", "--ask"}:
            return _format_topology(options)
    raise _usage_error(words)


_COMMANDS = ("expand", "fold", "machines")
_FLAGS = ("--json", "--ask", "--shell")


def _usage_error(words: list[str]) -> UsageError:
    for word in words:
        if word[:1] == "-" and word not in _FLAGS:
            hint = did_you_mean(word, (*_FLAGS, "--help", "--version")) or "see ezpz-topo --help"
            return UsageError(f"unknown option {word!r}; {hint}")
    if words[0] not in (*_COMMANDS, *_FLAGS):
        hint = did_you_mean(words[0], _COMMANDS) or "see ezpz-topo --help"
        return UsageError(f"unknown command {words[0]!r}; {hint}")
    forms = "[--json] [--ask], expand NODELIST, fold [HOST...], machines"
    return UsageError(f"{' '.join(words)!r}; expected one of: {forms}; see ezpz-topo --help")


def _require_hosts(hosts: Sequence[str]) -> Sequence[str]:
    if not hosts:
        raise UsageError("no host; expected one at least; see ezpz-topo --help")
    return hosts


def _read_hosts() -> list[str]:
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            "fold: no hosts; expected them as arguments, or one a line on standard input: "
            "ezpz-topo fold nid001 nid002"
        )
    return sys.stdin.read().split()


def _format_topology(options: Sequence[str]) -> str:
    topology = detect(ask="--ask" in options or None)
    if "--json" in options:
        return _format_json(topology)
    return _format_table(topology)


def _format_table(topology: Topology) -> str:
    rows = []
    name_width = 0
    value_width = 0
    for name, value, source in topology.explain():
        text = "unknown" if value is None else str(value)
        rows.append((name, text, source))
        name_width = max(name_width, len(name))
        # One long value (the hosts) must not push every source off the screen.
        if len(text) <= 40:
            value_width = max(value_width, len(text))
    lines = []
    for name, text, source in rows:
        lines.append(_wrap(f"{name:<{name_width}}  {text:<{value_width}}  ", source))
    lines += [f"note: {note}" for note in topology.notes]
    return "\n".join(lines)


def _wrap(start: str, text: str) -> str:
    """Wrap the last column of a row on a terminal; elsewhere a row is one line."""
    if sys.stdout is None or not sys.stdout.isatty():
        return f"{start}{text}".rstrip()
    width = max(shutil.get_terminal_size().columns, len(start) + 20)
    return textwrap.fill(
        text, width, initial_indent=start, subsequent_indent=" " * len(start),
        break_on_hyphens=False, break_long_words=False,
    ) or start.rstrip()  # fmt: skip


def _format_json(topology: Topology) -> str:
    facts: dict[str, object] = {}
    for name, value, source in topology.explain():
        facts[name.replace(" ", "_")] = {"value": value, "source": source}
    facts["notes"] = topology.notes
    return json.dumps(facts, indent=2)


def _format_shell(words: Sequence[str]) -> str:
    if set(words) - {"--shell", "--ask"}:
        raise UsageError(f"{' '.join(words)!r}: expected --shell alone or with --ask")
    topology = detect(ask="--ask" in words or None)
    job = topology.allocation
    hosts = "\n".join(job.hosts)
    if job.scheduler == "none":
        hosts = "localhost"
    facts = {
        "JOB": job.job_id or "none",
        "SCHEDULER": job.scheduler,
        "NODES": count_nodes(topology.rank, job)[0],
        "GPUS_PER_NODE": topology.accelerators.count,
        "HOSTS": hosts,
    }
    return "\n".join(f"EZPZ_{name}={shlex.quote(str(value))}" for name, value in facts.items())


def _format_machines() -> str:
    rows = [("machine", "site", "scheduler", "launcher", "devices", "file")]
    for machine in known_machines().values():
        devices = "as found"
        if machine.devices_per_node is not None:
            devices = str(machine.devices_per_node)
        row = (
            machine.name,
            machine.site,
            machine.scheduler,
            machine.launcher,
            f"{devices} {machine.device_type}".rstrip(),
            machine.path.removeprefix(f"{PACKAGED}/"),
        )
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, "", f"files without a folder: {PACKAGED}"])


class UsageError(TopoError):
    """The words of the command line make no sense."""
