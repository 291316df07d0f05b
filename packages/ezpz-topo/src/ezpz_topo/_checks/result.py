"""What a check of ``ezpz doctor`` found, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ezpz_topo._errors import CheckError

STATUSES = ("ok", "warning", "error")

_SEPARATOR = "; "
"""Between value, expectation and remedy in the errors of these packages."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check: every warning and error comes with its remedy.

    A check is a callable that takes the seconds that it has and returns one of these; a package
    contributes it by an entry point of the group ``ezpz.checks``, whose name is the check's.

    >>> CheckResult.warning("1 GiB free in /tmp", "remove what is old there").status
    'warning'

    Attributes:
        status: ``"ok"``; ``"warning"``: it works, with a loss; ``"error"``: it will not work.
        message: What was found, with the values that tell, in a sentence or two.
        remedy: What to do; empty where there is nothing to be done.
        details: The same for programs: texts, numbers, lists and mappings of these.
        name: The check's; ``ezpz doctor`` fills it in.
        source: The distribution and the object that checked; ``ezpz doctor`` fills it in.
        seconds: How long it took; ``ezpz doctor`` fills it in.
    """

    status: str
    message: str
    remedy: str = ""
    details: Mapping[str, object] = field(default_factory=dict)
    name: str = ""
    source: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise CheckError(
                f"a check's status is {self.status!r}; expected one of {', '.join(STATUSES)}"
            )
        for name in ("message", "remedy"):
            value: object = getattr(self, name)
            if not isinstance(value, str):
                raise CheckError(f"a check's {name} is {value!r}; expected text")
        if not self.message.strip():
            raise CheckError("a check's message is empty; expected what was found")
        if self.status != "ok" and not self.remedy.strip():
            raise CheckError(
                f"{self.status} without a remedy ({self.message[:60]!r}); expected what to do"
            )

    @classmethod
    def ok(cls, message: str, /, **details: object) -> CheckResult:
        """Return the result of what is as it should be."""
        return cls("ok", message, details=details)

    @classmethod
    def warning(cls, message: str, remedy: str, /, **details: object) -> CheckResult:
        """Return the result of what works, with a loss."""
        return cls("warning", message, remedy, details)

    @classmethod
    def error(cls, message: str, remedy: str, /, **details: object) -> CheckResult:
        """Return the result of what will not work."""
        return cls("error", message, remedy, details)

    @classmethod
    def of(cls, error: Exception, status: str = "error", /, **details: object) -> CheckResult:
        """Return the result that one of these packages' errors tells: its end is the remedy.

        >>> CheckResult.of(ValueError("n is 3; expected 2; start two")).remedy
        'start two'
        """
        message, separator, remedy = str(error).rpartition(_SEPARATOR)
        if not separator:
            message, remedy = str(error) or type(error).__name__, "see the message"
        return cls(status, message, remedy, {**details, "error": type(error).__name__})
