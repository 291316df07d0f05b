"""When the job ends, and so when ``--signal-before`` has to tell the ranks.

The end is what Slurm's ``SLURM_JOB_END_TIME`` says (from Slurm 23.02 on), else what scontrol or
qstat answer; `ezpz_topo` asks them, in UTC, and has the forms of their answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ezpz_launch._errors import LaunchError, UsageError
from ezpz_topo import Allocation, TopoError, get_allocation

_END, _START = "SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME"
_REMEDY = "leave --signal-before out, or"


class UnansweredError(LaunchError):
    """The scheduler, whose job this is, did not tell its end: it may do so later."""


def job_end(job: Allocation, env: Mapping[str, str], *, now: float) -> tuple[float, str]:
    """Return when the job's time limit ends, and by what that is known.

    A command of the scheduler is started only where the job's variables do not tell, or tell
    of an end that is past: the limit of a running job can be extended, its variables not.

    Args:
        job: The job that we are in, as a topology has it.
        env: The job's environment.
        now: Seconds since 1970.

    Returns:
        Seconds since 1970, and the source.

    Raises:
        UnansweredError: The scheduler does not tell now.
        LaunchError: There is no job, or it has no time limit.
    """
    if job.ends_at is not None and job.ends_at.timestamp() > now:
        return _told(job)
    try:
        asked = get_allocation({**env, _END: ""}, ask=True)
    except TopoError as error:
        kind = LaunchError if job.scheduler == "none" else UnansweredError
        raise kind(f"--signal-before: the job's end is not known: {error}") from error
    if asked.ends_at is not None:
        return _told(asked)
    if asked.scheduler == "none":
        raise LaunchError(
            f"--signal-before: no job here ({asked.sources['scheduler']}); expected one of Slurm "
            f"or PBS, which has an end; {_REMEDY} send SIGUSR1 to ezpz-launch yourself"
        )
    why = next((note for note in asked.notes if note.startswith("end of the walltime: ")), "")
    if why:
        raise UnansweredError(f"--signal-before: {why}; expected the end of job {asked.job_id}")
    raise LaunchError(
        f"--signal-before: job {asked.job_id} has no time limit, says {asked.scheduler}; expected "
        f"one; {_REMEDY} submit with a walltime"
    )


def _told(job: Allocation) -> tuple[float, str]:
    assert job.ends_at is not None
    return job.ends_at.timestamp(), job.sources.get("ends_at", job.scheduler)


def time_limit(env: Mapping[str, str]) -> float | None:
    """Return the job's time limit in seconds, where its variables tell; else None."""
    start, end = env.get(_START, ""), env.get(_END, "")
    if not all(re.fullmatch("[1-9][0-9]{8,9}", text) for text in (start, end)):
        return None
    seconds = int(end) - int(start)
    # Without a limit the end is 2**32 - 1 or thereabouts.
    return float(seconds) if seconds > 0 and int(end) < 2**32 - 16 else None


def when_to_signal(
    end: float, before: float, now: float, *, limit: float | None = None
) -> tuple[float, str]:
    """Return how long to wait for the signal, and what people should know.

    Where less is left than was asked for, the signal is due at once: what was to be done in
    that time may fit in what is left. It must still not come before the ranks have started,
    which a signal that they do not handle yet would end.

    Args:
        end: The job's end, seconds since 1970.
        before: So many seconds before it the signal is due.
        now: Seconds since 1970.
        limit: The job's whole time limit in seconds, where it is known.

    Returns:
        Seconds to wait from ``now``, 0 for at once; and a note, empty where all is as asked.

    Raises:
        UsageError: ``before`` is not above 0, or not below the limit.
    """
    if not 0 < before < float("inf"):
        raise UsageError(f"--signal-before {before:g}: expected a number of seconds above 0")
    if limit is not None and before >= limit:
        raise UsageError(
            f"--signal-before {before:g}: the whole job has {limit:g} s; expected less; submit "
            "with a longer walltime, or ask for the signal later"
        )
    left = end - now
    if left > before:
        return left - before, ""
    what = f"{left:.0f} s of the job are left" if left > 0 else f"its end was {-left:.0f} s ago"
    return 0.0, f"--signal-before {before:g}: {what}; SIGUSR1 is sent as soon as the ranks run"
