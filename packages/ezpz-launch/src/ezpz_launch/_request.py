"""What the user asked for: our own options, checked; the command, untouched."""

from __future__ import annotations

from dataclasses import dataclass

from ._errors import UsageError

LAUNCHERS = ("auto", "pals", "mpiexec", "hydra", "openmpi", "srun", "torchrun")


@dataclass(frozen=True, slots=True)
class Request:
    """One launch, as asked.

    Attributes:
        command: The user's words, verbatim.
        nproc: Number of ranks, or None to choose by device and cores.
        ppn: Ranks a host, or None to choose.
        nodes: Number of hosts, counted from the first; None for all.
        hostfile: A hostfile that comes before all others.
        include: A nodelist of the hosts to use.
        exclude: A nodelist of hosts not to use.
        launcher: One of `LAUNCHERS`.
        machine: A machine's name instead of the one that is found.
        cpu_bind: A bind list's name, or cores as ``0-7:8-15``; ``"none"`` for no binding.
        env: Variables for every rank, as ``NAME=VALUE``.
        launcher_args: Words for the launcher itself.
        dry_run: Explain the launch instead of starting it.
        json: Explain it for programs.
    """

    command: tuple[str, ...]
    nproc: int | None = None
    ppn: int | None = None
    nodes: int | None = None
    hostfile: str = ""
    include: str = ""
    exclude: str = ""
    launcher: str = "auto"
    machine: str = ""
    cpu_bind: str = ""
    env: tuple[str, ...] = ()
    launcher_args: tuple[str, ...] = ()
    dry_run: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        for flag, value, what in (
            ("-n", self.nproc, "rank"),
            ("--ppn", self.ppn, "rank"),
            ("-N", self.nodes, "host"),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{flag} {value}: expected at least 1 {what}")
        if self.launcher not in LAUNCHERS:
            raise UsageError(f"--launcher {self.launcher}: expected one of {', '.join(LAUNCHERS)}")
        for pair in self.env:
            name, equals, _ = pair.partition("=")
            if not equals or not name.isidentifier():
                raise UsageError(f"--env {pair!r}: expected NAME=VALUE")
        if self.json and not self.dry_run:
            raise UsageError("--json: expected --dry-run beside it")
        if not self.command:
            raise UsageError(
                "no command; expected one after the options, such as: "
                "ezpz-launch -n 2 python train.py"
            )
