"""What the user asked for: our own options, checked; the command, untouched."""

from __future__ import annotations

from dataclasses import dataclass

from ._errors import UsageError

LAUNCHERS = ("auto", "pals", "mpiexec", "hydra", "openmpi", "srun", "torchrun", "spawn")

GRACE = 7.0
"""Seconds from SIGTERM to SIGKILL, unless asked otherwise.

PBS kills all of a job 8 to 10 s after its SIGTERM (measured): until then the ranks have been
killed, and the end is on record.
"""


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
        options: Names of the machine's options to use.
        cpu_bind: A bind list's name, or cores as ``0-7:8-15``; ``"none"`` for no binding.
        env: Variables for every rank, as ``NAME=VALUE``.
        one_device: Whether each rank sees its own device only.
        log_dir: Folder for the output of each rank, instead of the terminal.
        tee: Whether the output is shown as well as written to ``log_dir``.
        only_ranks: The ranks whose output is shown, in order; None for all.
        prefix: Whether each line of output begins with its rank and host.
        idle_timeout: Seconds without output after which the launch has hung; 0 for never.
        grace: Seconds from SIGTERM to SIGKILL.
        signal_before: Seconds before the job's end at which the ranks get SIGUSR1; 0 for never.
        retries: How often a failed launch is started again.
        nested: Whether a rank of another launch may launch.
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
    options: tuple[str, ...] = ()
    cpu_bind: str = ""
    env: tuple[str, ...] = ()
    one_device: bool = False
    log_dir: str = ""
    tee: bool = False
    only_ranks: tuple[int, ...] | None = None
    prefix: bool = False
    idle_timeout: float = 0.0
    grace: float = GRACE
    signal_before: float = 0.0
    retries: int = 0
    nested: bool = False
    launcher_args: tuple[str, ...] = ()
    dry_run: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.launcher not in LAUNCHERS:
            raise UsageError(f"--launcher {self.launcher}: expected one of {', '.join(LAUNCHERS)}")
        for pair in self.env:
            name, equals, _ = pair.partition("=")
            if not equals or not name.isidentifier():
                raise UsageError(f"--env {pair!r}: expected NAME=VALUE")
        if self.tee and not self.log_dir:
            raise UsageError("--tee: expected --log-dir DIR beside it, the files to write")
        if self.json and not self.dry_run:
            raise UsageError("--json: expected --dry-run beside it")
        if not self.command:
            raise UsageError(
                "no command; expected one after the options, such as: "
                "ezpz-launch -n 2 python train.py"
            )

    def _check_numbers(self) -> None:
        for flag, value, what in (
            ("-n", self.nproc, "rank"),
            ("--ppn", self.ppn, "rank"),
            ("-N", self.nodes, "host"),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{flag} {value}: expected at least 1 {what}")
        if self.retries < 0:
            raise UsageError(f"--retries {self.retries}: expected 0 or more")
        for flag, seconds in (
            ("--idle-timeout", self.idle_timeout),
            ("--grace", self.grace),
            ("--signal-before", self.signal_before),
        ):
            # Not "< 0": a NaN is no time either.
            if not 0 <= seconds < float("inf"):
                raise UsageError(f"{flag} {seconds}: expected 0 seconds or more")
        if self.only_ranks is not None and (not self.only_ranks or min(self.only_ranks) < 0):
            raise UsageError(f"--only-ranks {self.only_ranks}: expected ranks from 0")
