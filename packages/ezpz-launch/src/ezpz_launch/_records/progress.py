r"""How a script tells ezpz-launch that it got further: the contract of ``EZPZ_PROGRESS_FILE``.

With ``--retries`` the launcher starts a failed run again only while it gets somewhere. It
exports ``EZPZ_PROGRESS_FILE``, the path of a file that does not exist at first, and whoever
completes a check-point or logs a step (one rank is enough, usually rank 0) puts the highest
step so far there: a whole number from 0 in decimal digits, a newline or none after it, nothing
else. Write it whole, so that no reader sees half a number: into a file beside it that is then
renamed over it, or, as the shell does, by one write to a file just opened::

    path = os.environ.get("EZPZ_PROGRESS_FILE")
    if path and rank == 0:
        with open(path + ".new", "w") as file:
            file.write(f"{step}\n")
        os.replace(path + ".new", path)

    echo 1200 > "$EZPZ_PROGRESS_FILE"

Steps count over all attempts: a script that resumes at 5,000 reports 5,001 next, and an
attempt has made progress when it reports more than any before it. The file is beside the job's
record, on the first host of the launch; where the home directory is shared, every host sees
it. It is removed when the launch ends.
"""

from __future__ import annotations

import os
import re

PROGRESS_VARIABLE = "EZPZ_PROGRESS_FILE"
"""The variable that names the file."""

_LONGEST = 64
_STEP = re.compile(rb"\s*([0-9]{1,18})\s*")


def read_progress(path: str) -> int | None:
    """Return the step that was reported last, or None where there is none that can be read.

    Never an error: a report that is missing, damaged, negative or half written is no report.
    """
    if not os.path.isfile(path):  # a FIFO would wait for its writer
        return None
    try:
        with open(path, "rb") as file:
            text = file.read(_LONGEST + 1)
    except OSError:
        return None
    step = _STEP.fullmatch(text) if len(text) <= _LONGEST else None
    return int(step[1]) if step else None
