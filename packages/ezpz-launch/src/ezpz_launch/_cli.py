"""The command ``ezpz-launch``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ezpz_topo import TopoError, Topology, detect

from ._argv import OPTIONS, split
from ._choose import choose_launcher, imagine_launcher
from ._errors import (
    CommandNotExecutableError,
    CommandNotFoundError,
    LaunchError,
    UsageError,
)
from ._options import request_of
from ._plan import LaunchPlan, plan
from ._port import free_port
from ._request import Request
from ._run import run
from ._version import __version__
from .launchers import argv as argv_of
from .launchers import hostfile_of

USAGE = "ezpz-launch [OPTION...] [--] COMMAND [ARGUMENT...]"

EXAMPLES = (
    ("ezpz-launch python train.py --lr 1e-4", "one rank a device of this host"),
    ("ezpz-launch -n 2 -m ezpz.examples.minimal", "two ranks of a module"),
    ("ezpz-launch --dry-run -n 4 python train.py", "what would be run, and why"),
    ("ezpz-launch --dry-run --machine aurora -N 4 python train.py", "the same, from a laptop"),
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
        return _print(help_page())
    if "version" in options:
        return _print(__version__)
    request = request_of(options, command)
    if request.dry_run and request.machine:
        return _print(_imagined(request, env))
    topology = detect({**env, "EZPZ_MACHINE": request.machine} if request.machine else env)
    _refuse_nested(topology)
    _require_command(request.command[0], env)
    launcher = choose_launcher(topology, request, env, beside=os.path.dirname(sys.executable))
    hosts, source, slots = _hosts(topology, request, env)
    planned = plan(
        topology,
        request,
        launcher,
        hosts=hosts,
        hosts_source=source,
        slots=slots,
        hostfile=HOSTFILE,
        port=free_port(),
        user_env=env,
        as_root=os.geteuid() == 0,
    )
    if request.dry_run:
        return _print(_explained(planned, request))
    _refuse_what_is_not_started_yet(planned, topology)
    directory = env.get("TMPDIR") or "/tmp"
    with _hostfile(planned, directory) as ready:
        return run(
            argv_of(ready),
            nproc=ready.nproc,
            environment={**env, **ready.environment},
            status_directory=directory,
        )


def _print(text: str) -> int:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # `ezpz-launch --help | head -1` is no failure, nor is the interpreter's own flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


HOSTFILE = "HOSTFILE"
"""Stands in a dry run for the file that a launch would write."""


@contextmanager
def _hostfile(planned: LaunchPlan, directory: str) -> Iterator[LaunchPlan]:
    """Write the hostfile that the launcher reads, if it reads one, for as long as it may."""
    if not _needs_hostfile(argv_of(planned)):
        yield planned
        return
    path = os.path.join(directory, f"ezpz-hosts-{os.urandom(8).hex()}")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in hostfile_of(planned))
        yield replace(planned, hostfile=path)
    finally:
        os.unlink(path)


def _needs_hostfile(words: Sequence[str]) -> bool:
    return any(word in (HOSTFILE, f"--nodelist={HOSTFILE}") for word in words)


def _imagined(request: Request, env: Mapping[str, str]) -> str:
    """Explain a launch on a machine that this is not."""
    if request.hostfile:
        raise UsageError("--dry-run --machine: its hosts are made up; expected no --hostfile")
    from ezpz_topo import imagine  # noqa: PLC0415  # only a dry run needs it

    topology = imagine(request.machine, request.nodes or 1, env)
    planned = plan(
        topology,
        request,
        imagine_launcher(topology, request),
        hosts=topology.allocation.hosts,
        hosts_source=topology.allocation.sources["hosts"],
        hostfile=HOSTFILE,
        port=29500,
        user_env={},
    )
    return _explained(planned, request)


def _hosts(
    topology: Topology, request: Request, env: Mapping[str, str]
) -> tuple[Sequence[str], str, int]:
    """Return the hosts that there are, where they come from, and the fewest slots of one."""
    if request.hostfile or env.get("HOSTFILE"):
        from ezpz_topo import get_hosts  # noqa: PLC0415  # 4 ms

        found = get_hosts(request.hostfile or None, env)
        told = [entry.slots for entry in found.entries if entry.slots]
        return [entry.host for entry in found.entries], found.source, min(told, default=0)
    job = topology.allocation
    return job.hosts, job.sources["hosts"], min(job.slots or (0,))


def _explained(planned: LaunchPlan, request: Request) -> str:
    from ._explain import explain, explain_json  # noqa: PLC0415  # only a dry run needs it

    words = argv_of(planned)
    lines = hostfile_of(planned) if _needs_hostfile(words) else []
    return (explain_json if request.json else explain)(planned, words, lines)


def _refuse_what_is_not_started_yet(planned: LaunchPlan, topology: Topology) -> None:
    """Refuse what is planned already, and not yet seen through to its end."""
    kind, job = planned.launcher.kind, topology.allocation
    if planned.on_this_host and kind in ("hydra", "openmpi"):
        return
    where = "one host" if planned.on_this_host else f"{len(planned.placement.hosts)} hosts"
    if not job.on_node:
        where = "a shell that is not on the job's node"
    elif job.num_nodes > 1:
        where = f"{job.num_nodes} nodes"
    who = f"{job.scheduler} job {job.job_id}: " if job.job_id else ""
    direct = "srun -n RANKS" if job.scheduler == "slurm" else "mpiexec -n RANKS --ppn PER_NODE"
    raise LaunchError(
        f"{who}{where} ({planned.sources['hosts']}) by {kind}: this version of ezpz-launch plans "
        "that (--dry-run), but starts ranks only on the host it runs on, by MPICH's or Open MPI's "
        f"mpiexec; expected -N 1; or use `{direct} COMMAND` (ezpz.setup_torch works under it)"
    )


def help_page() -> str:
    """Return the page that ``--help`` prints."""
    lines = [f"usage: {USAGE}", "", "Start COMMAND on every rank; its words are not touched.", ""]
    lines.append("options:")
    for option in OPTIONS:
        flags = ", ".join([*([f"-{option.short}"] if option.short else []), f"--{option.name}"])
        lines.append(f"  {f'{flags} {option.value}'.rstrip():<22} {option.help}")
    lines += ["", "examples:"]
    lines += [f"  {words:<59} {what}" for words, what in EXAMPLES]
    lines += [
        "",
        "Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and",
        "MASTER_PORT, as under torchrun.",
        "",
        "exit status: 0; that of the first rank that failed (128 + signal if it was killed);",
        "2 usage; 126, 127 the command cannot be executed or found; 130 Ctrl-C; 143 SIGTERM.",
    ]
    return "\n".join(lines)


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
