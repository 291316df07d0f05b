"""A fake qstat and qselect: what OpenPBS 23.06 answered, replayed at the process boundary.

``fake.py JOBS qstat -E -fw ID...`` and ``fake.py JOBS qselect -T -u USER -s R``. JOBS is
a JSON file, id to attributes; ``stime`` is in seconds since 1970, which qstat itself turns into
text in its own time zone. JOBS.log gets one line a call, its arguments. ``-T`` is in qselect's
manual page and was not captured.
"""

import json
import sys
import time

UNKNOWN, FINISHED = 153, 35


def qstat(jobs, arguments):
    assert arguments[:2] == ["-E", "-fw"], arguments
    found, status = 0, 0
    for job_id in arguments[2:]:
        if job_id not in jobs:
            print(f"qstat: Unknown Job Id {job_id}", file=sys.stderr)
            status = UNKNOWN
        elif jobs[job_id]["job_state"] == "F":
            why = "Job has finished, use -x or -H to obtain historical job information"
            print(f"qstat: {job_id} {why}", file=sys.stderr)
            status = FINISHED
        else:
            print(f"Job Id: {job_id}")
            for name, value in jobs[job_id].items():
                pairs = (
                    {f"{name}.{key}": each for key, each in value.items()}
                    if isinstance(value, dict)
                    else {name: value}
                )
                for key, each in pairs.items():
                    shown = time.ctime(each) if key == "stime" and isinstance(each, int) else each
                    print(f"    {key} = {shown}")
            print()
            found += 1
    return 0 if found else status


def qselect(jobs, arguments):
    assert arguments[0] == "-T", arguments
    assert arguments[1] == "-u", arguments
    assert arguments[3:] == ["-s", "R"], arguments
    for job_id, job in jobs.items():
        if job["job_state"] == "R" and job["Job_Owner"].partition("@")[0] == arguments[2]:
            print(job_id)
    return 0


path, command, *rest = sys.argv[1:]
with open(f"{path}.log", "a", encoding="utf-8") as log:
    print(command, *rest, file=log)
with open(path, encoding="utf-8") as file:
    sys.exit({"qstat": qstat, "qselect": qselect}[command](json.load(file), rest))
