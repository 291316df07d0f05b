"""When the job ends, and so when --signal-before has to signal the ranks."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping

from ezpz_launch._errors import LaunchError, UsageError, say
from ezpz_launch._run.launch import NEVER
from ezpz_topo import Allocation, TopoError, get_allocation

_END, _START = "SLURM_JOB_END_TIME", "SLURM_JOB_START_TIME"
_REMEDY = "leave --signal-before out, or"

_ANSWER = 3.0  # seconds that the scheduler has to tell the job's end before the ranks start without
_ASK_AGAIN = 60.0  # seconds, at most, between two questions to a scheduler that does not answer


class UnansweredError(LaunchError):
    """The scheduler, whose job this is, did not tell its end: it may do so later."""


def find_signal_time(before: float, job: Allocation, env: Mapping[str, str]) -> Callable[[], float]:
    """Return what tells when --signal-before is due, in seconds since 1970."""
    limit, due, errors = time_limit(env), [NEVER], list[LaunchError]()
    asked, late = threading.Event(), threading.Event()

    def ask() -> None:
        pause = 1.0
        while True:
            try:
                now = time.time()
                wait, note = when_to_signal(job_end(job, env, now), before, now, limit=limit)
                due.append(now + wait)
                if note or late.is_set():
                    say(note or "--signal-before: the job's end is known now")
                break
            except UnansweredError as error:
                errors.append(error)
                asked.set()
            except LaunchError as error:
                errors.append(error)
                if late.is_set():
                    say(str(error))
                break
            time.sleep(pause)
            pause = min(2 * pause, _ASK_AGAIN)
        asked.set()

    threading.Thread(target=ask, daemon=True).start()
    asked.wait(_ANSWER)
    late.set()
    if errors and not isinstance(errors[0], UnansweredError):
        raise errors[0]
    if due[-1] == NEVER:
        why = errors[0] if errors else f"--signal-before: {job.scheduler} does not answer"
        say(f"{why}; the ranks start, and it is asked again until it tells")
    return lambda: due[-1]


def job_end(job: Allocation, env: Mapping[str, str], now: float) -> float:
    if job.ends_at is not None and job.ends_at.timestamp() > now:
        return job.ends_at.timestamp()
    try:
        asked = get_allocation({**env, _END: ""}, ask=True)
    except TopoError as error:
        kind = LaunchError if job.scheduler == "none" else UnansweredError
        raise kind(f"--signal-before: the job's end is not known: {error}") from error
    if asked.ends_at is not None:
        return asked.ends_at.timestamp()
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


def time_limit(env: Mapping[str, str]) -> float | None:
    """Return the job's time limit in seconds, where its variables tell."""
    start, end = env.get(_START, ""), env.get(_END, "")
    if not all(re.fullmatch("[1-9][0-9]{8,9}", text) for text in (start, end)):
        return None
    seconds = int(end) - int(start)
    # Without a limit the end is 2**32 - 1 or thereabouts.
    return float(seconds) if seconds > 0 and int(end) < 2**32 - 16 else None


def when_to_signal(
    end: float, before: float, now: float, *, limit: float | None = None
) -> tuple[float, str]:
    """Return the seconds to wait for the signal, and what people should know."""
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
