"""The command ``ezpz-launch``."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence

from ezpz_topo import TopoError, Topology, detect

from ._argv import OPTIONS, split
from ._errors import (
    CommandNotExecutableError,
    CommandNotFoundError,
    LaunchError,
    UsageError,
)
from ._explain import explain
from ._plan import plan
from ._request import Request
from ._run import run
from ._version import __version__
from .launchers import mpiexec

USAGE = "ezpz-launch [OPTION...] [--] COMMAND [ARGUMENT...]"

EXAMPLES = (
    ("ezpz-launch python train.py --lr 1e-4", "one rank a device of this host"),
    ("ezpz-launch -n 2 python -m ezpz.examples.minimal", "two ranks"),
    ("ezpz-launch --dry-run -n 4 python train.py", "what would be run, and why"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ezpz-launch`` with these words (default: the process's) and return its exit status."""
    try:
        return _main(sys.argv[1:] if argv is None else argv, os.environ)
    except (LaunchError, TopoError) as error:
        print(f"ezpz-launch: {error}", file=sys.stderr)
        return getattr(error, "exit_status", UsageError.exit_status)
    except KeyboardInterrupt:
        return 130


def _main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    options, command = split(argv)
    if "help" in options:
        print(help_page())
        return 0
    if "version" in options:
        print(__version__)
        return 0
    request = _request(options, command)
    topology = detect(env)
    _refuse_nested(topology)
    _require_command(request.command[0], env)
    launcher = mpiexec.find(env, beside=os.path.dirname(sys.executable))
    planned = plan(topology, request, port=_free_port(), user_env=env)
    words = mpiexec.argv(planned, launcher)
    if request.dry_run:
        print(explain(planned, words, launcher))
        return 0
    return run(
        words,
        nproc=planned.nproc,
        environment={**env, **planned.environment},
        status_directory=env.get("TMPDIR") or "/tmp",
    )


def help_page() -> str:
    """Return the page that ``--help`` prints."""
    lines = [f"usage: {USAGE}", "", "Start COMMAND on every rank; its words are not touched.", ""]
    lines.append("options:")
    for option in OPTIONS:
        flags = ", ".join([*([f"-{option.short}"] if option.short else []), f"--{option.name}"])
        lines.append(f"  {f'{flags} {option.value}'.rstrip():<18} {option.help}")
    lines += ["", "examples:"]
    lines += [f"  {words:<50} {what}" for words, what in EXAMPLES]
    lines += [
        "",
        "Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and",
        "MASTER_PORT, as under torchrun.",
        "",
        "exit status: 0; that of the first rank that failed (128 + signal if it was killed);",
        "2 usage; 126, 127 the command cannot be executed or found; 130 Ctrl-C; 143 SIGTERM.",
    ]
    return "\n".join(lines)


def _request(options: Mapping[str, str | bool], command: tuple[str, ...]) -> Request:
    """Turn our own options into a request; the command is passed by."""
    nproc = options.get("nproc", "")
    if options.keys() <= {"nproc"} and str(nproc or 0).isdecimal():
        # The common launch. Fire brings asyncio with it: as long as all the rest of the
        # launcher takes to start. A test holds this to what Fire makes of the same words.
        return Request(command, int(nproc) if nproc else None)
    return _request_by_fire(options, command)


def _request_by_fire(options: Mapping[str, str | bool], command: tuple[str, ...]) -> Request:
    """Let Fire parse our own options, and nothing else."""
    import fire  # noqa: PLC0415  # see _request

    def build(nproc: int | None = None, dry_run: bool = False) -> Request:
        if "nproc" in options and type(nproc) is not int:
            raise UsageError(f"-n {options['nproc']}: expected a whole number of ranks")
        return Request(command, nproc, dry_run)

    words = [f"--{name}={value}" for name, value in options.items()]
    # Fire prints what it returns unless it is serialised to nothing.
    request: Request = fire.Fire(build, command=words, name="ezpz-launch", serialize=_nothing)
    return request


def _nothing(_result: object) -> None:
    return None


def _refuse_nested(topology: Topology) -> None:
    rank = topology.rank
    if rank.world_size > 1:
        raise UsageError(
            f"this process is rank {rank.rank} of {rank.world_size} already "
            f"({rank.sources['rank']}); expected to be started outside of a launch"
        )


def _require_command(program: str, env: Mapping[str, str]) -> None:
    """Check that the command exists before any rank is started for it."""
    has_directory = os.sep in program
    directories = [""] if has_directory else env.get("PATH", "").split(os.pathsep)
    candidates = [os.path.join(directory, program) for directory in directories]
    found = [path for path in candidates if os.path.isfile(path)]
    if any(os.access(path, os.X_OK) for path in found):
        return
    if found:
        hint = (
            f"ezpz-launch python {program}" if program.endswith(".py") else f"chmod +x {found[0]}"
        )
        raise CommandNotExecutableError(f"{found[0]} is not executable; try: {hint}")
    script = program.endswith(".py") and os.path.isfile(program)
    where = "no such file" if has_directory else "not found on PATH"
    hint = f"; try: ezpz-launch python {program}" if script else ""
    raise CommandNotFoundError(f"{program!r}: {where}{hint}")


def _free_port() -> int:
    """Return a port that is free now and that no outgoing connection will be given."""
    # Below Linux's and macOS's ephemeral ranges: the ranks bind it seconds later.
    first, count = 20000, 10000
    start = int.from_bytes(os.urandom(4), "little")
    for step in range(count):
        port = first + (start + step) % count
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise LaunchError(
        f"every port from {first} to {first + count - 1} is taken; expected one for the ranks to "
        "meet at; end what holds them"
    )
