"""qstat's JSON: asked for, mended where it is not quite JSON, and parsed.

The forms are those captured from OpenPBS 23.06; not run on hardware.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence

from . import _commands
from ._errors import InvalidVariableError, SchedulerError

QSTAT = "qstat -f -F json"
_UNKNOWN, _FINISHED = 153, 35

_JOB_ID = re.compile(r"[0-9]+(?:\[[0-9]*\])?(?:[.@][0-9A-Za-z_.@-]+)?")

Attributes = Mapping[str, object]
"""One job of qstat's JSON."""


def get_pbs_folder(env: Mapping[str, str] | None = None) -> str:
    """Return where PBS's commands are, as PBS itself knows it; a shell may not have it on PATH."""
    env = os.environ if env is None else env
    prefix = env.get("PBS_EXEC", "")
    if not prefix:
        with contextlib.suppress(OSError):
            conf = env.get("PBS_CONF_FILE") or "/etc/pbs.conf"
            with open(conf, encoding="utf-8", errors="replace") as file:
                for line in file:
                    if line.startswith("PBS_EXEC="):
                        prefix = line.partition("=")[2].strip().strip("\"'")
    return os.path.join(prefix or "/opt/pbs", "bin")


def ask_for_job(job_id: str, env: Mapping[str, str]) -> Attributes:
    status, jobs = ask_for_jobs([job_id], env)
    # The server's name may be left out of an id, and is told in full.
    number = re.split("[.@]", job_id)[0]
    named = [job for key, job in jobs.items() if key.partition(".")[0] == number]
    if len(named) == 1:
        return named[0]
    what = {_FINISHED: "has finished", _UNKNOWN: "is unknown to the server"}
    raise SchedulerError(
        f"{QSTAT}: job {job_id} {what.get(status, 'is not in the answer')}; expected one that "
        "runs; unset PBS_JOBID where it is left over from an earlier job"
    )


def ask_for_jobs(
    job_ids: Sequence[str], env: Mapping[str, str]
) -> tuple[int, dict[str, Attributes]]:
    """Return qstat's exit status and the jobs that it told."""
    for job_id in job_ids:
        if not _JOB_ID.fullmatch(job_id):
            raise InvalidVariableError(
                f"PBS job id {job_id[:80]!r}; expected one such as 1.pbs-0001 or 40[1].pbs-0001; "
                "unset PBS_JOBID, or give it as qstat prints it"
            )
    # qstat itself makes text of times, with ctime (OpenPBS, qstat.c): the zone is ours to choose.
    answer = _commands.ask(
        (*QSTAT.split(), *job_ids),
        env={**env, "TZ": "UTC0"},
        good=(0, _UNKNOWN, _FINISHED),
        place=get_pbs_folder(env),
    )
    if answer.status and not answer.stdout.strip():
        return answer.status, {}
    told = _parse(answer.stdout).get("Jobs", {})
    jobs = told if isinstance(told, dict) else {}
    return answer.status, {key: job for key, job in jobs.items() if isinstance(job, dict)}


def _parse(text: str) -> Attributes:
    """Parse qstat's JSON, which is not always JSON; numbers stay the text that they were."""
    import json  # noqa: PLC0415

    problem = ""
    for mend in (str, _mended):
        try:
            # A job called 1e5 is told as a number: as text it keeps its name.
            told = json.loads(
                mend(text), strict=False, parse_int=str, parse_float=str, parse_constant=str
            )
        except (ValueError, RecursionError) as error:
            problem = problem or str(error)
            continue
        if isinstance(told, dict):
            return told
        problem = f"a JSON {type(told).__name__}"
    raise SchedulerError(
        f"{QSTAT} printed what is no JSON object ({problem}), {text[:60]!r}; expected one with "
        "Jobs; run it by hand: this PBS is older than its JSON, or a job's name or arguments "
        "hold quotes or backslashes that it does not escape"
    )


def _mended(text: str) -> str:
    """Mend what OpenPBS is known to print: its own escapes, and bare words and 007 for numbers.

    Most of it is the user's environment, which nobody here needs.
    """
    text = re.sub(
        r'(?ms)^([ \t]*)"Variable_List":\s*\{$.*?(?:^\1\}|\Z)', r'\1"Variable_List":{}', text
    )
    text = re.sub(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?', lambda m: m[0] if m[1] else r"\\", text)
    return re.sub(r'(?m)^([ \t]*"[^"\n]*":[ \t]*)([^\s"{}\[\],]+)(,?)$', r'\1"\2"\3', text)


def text_of(attributes: Attributes, key: str) -> str:
    value = attributes.get(key)
    return value if isinstance(value, str) else ""
