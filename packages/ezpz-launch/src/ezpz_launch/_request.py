"""What the user asked for: our own options, checked; the command, untouched."""

from __future__ import annotations

from dataclasses import dataclass

from ._errors import UsageError


@dataclass(frozen=True, slots=True)
class Request:
    """One launch, as asked.

    Attributes:
        command: The user's words, verbatim.
        nproc: Number of ranks, or None to choose by device and cores.
        dry_run: Explain the launch instead of starting it.
    """

    command: tuple[str, ...]
    nproc: int | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.nproc is not None and self.nproc < 1:
            raise UsageError(f"-n {self.nproc}: expected at least 1 rank")
        if not self.command:
            raise UsageError(
                "no command; expected one after the options, such as: "
                "ezpz-launch -n 2 python train.py"
            )
