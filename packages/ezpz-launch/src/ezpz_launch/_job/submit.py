"""`ezpz submit`: what is asked of the scheduler, the batch script, and into the queue with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ezpz_launch._errors import LaunchError, UsageError
from ezpz_launch._job.chain import (
    CHAIN,
    Chain,
    change_chain,
    delete_jobs,
    jobs_folder,
    keys_of,
    output_of,
    path_of,
    queue_one,
    submit_words,
)
from ezpz_launch._job.queue import SCHEDULERS, Scheduler, clock
from ezpz_launch._plan.command import require_command, require_program
from ezpz_launch._plan.explain import format_decisions
from ezpz_launch._plan.options import (
    OPTIONS,
    Options,
    Request,
    build_request,
    count_field,
    format_help_row,
    is_positive,
    list_options,
    option_field,
    parse_number,
    parse_words,
    split,
)
from ezpz_launch._run.record import (
    dump,
    iso_time,
    make_folder,
    name_of,
    new_id,
    prune,
    type_of,
    unwritable,
    write,
)
from ezpz_launch._version import __version__
from ezpz_topo import Machine, SchedulerError, find_schedulers, get_machine_info, redact

# The options of the job, beside those of the launch in it.


_DURATION = r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?|(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)"


def _duration(flag: str, text: str) -> int:
    found = re.fullmatch(_DURATION, text, re.ASCII) if len(text) < 20 else None
    parts = [int(part or 0) for part in found.groups()] if found else [0] * 7
    days, hours, minutes = (parts[at] + parts[at + 3] for at in range(3))
    if not (total := ((days * 24 + hours) * 60 + minutes) * 60 + parts[6]):
        # A bare number is minutes to Slurm and seconds to PBS.
        raise UsageError(f"{flag} {text!r}: expected such as 30m, 2h, 1h30m, 1d12h or 1:30:00")
    return total


_A_NAME = r"[A-Za-z][\w.+-]{0,99}"


@dataclass(frozen=True, slots=True)
class Submission(Request):
    """A job, as requested; what `Request` has, and the job's own. Raises as `Request` does."""

    nodes: int | None = count_field(
        "nodes of the job; default: 1",
        expected="at least 1 node",
        short="N",
        aliases="--nnodes",
        needed_by="everyone who submits; --nnodes: users of torchrun",
    )
    time: int | None = option_field(
        "how long it may run: 30m, 2h, 1d12h, 1:30:00",
        "TIME",
        default=None,
        parse=_duration,
        needed_by="everyone who submits",
    )
    queue: str = option_field(
        "PBS's queue, Slurm's partition; default: the scheduler's",
        "NAME",
        aliases="--partition -q -p --qos",
        needed_by="users of sites with several queues; the other names: users of sbatch and qsub",
    )
    account: str = option_field(
        "the project that pays; default: the scheduler's",
        "NAME",
        short="A",
        aliases="--project",
        needed_by="users of sites that charge projects",
    )
    name: str = option_field(
        "the job's name; default: the script's",
        "NAME",
        aliases="--job-name -J",
        check=re.compile(_A_NAME).fullmatch,
        expected="letters, digits and _.+-, a letter first",
        needed_by="users with several jobs; --job-name and -J: those of sbatch",
    )
    after: str = option_field(
        "begin when this job has ended well",
        "JOB",
        aliases="--dependency --depend",
        needed_by="users whose job reads the results of another",
    )
    env_setup: str = option_field(
        "sets up the job's environment, instead of this one's",
        "FILE",
        needed_by="users of modules or utils.sh, who submit without an active environment",
    )
    submit_args: tuple[str, ...] = option_field(
        "words for sbatch or qsub, quoted as one",
        "TEXT",
        default=(),
        parse=parse_words,
        needed_by="users of a scheduler's flag that has no option here",
    )
    script: str = option_field(
        "write the batch script to FILE, and submit nothing",
        "FILE",
        needed_by="people who edit the script and submit it by themselves",
    )
    until_done: int = option_field(
        "jobs that each submit the next, until it is done; at most N",
        "N",
        default=0,
        bare_value="20",
        parse=parse_number,
        check=is_positive,
        expected="at least 1 job",
        needed_by="users whose training is longer than a job may be",
    )
    chain: int = option_field(
        "the same with N jobs that are submitted now",
        "N",
        default=0,
        parse=parse_number,
        check=lambda n: n >= 2,
        expected="at least 2 jobs",
        needed_by="the same users at sites where jobs may not submit jobs",
    )


SUBMIT_OPTIONS = (*list_options(Submission), *(each for each in OPTIONS if not each.field))


# The job: what the scheduler is asked for, each value with its reason, and the batch script.


class Row(NamedTuple):
    label: str
    value: str
    why: str
    words: str = ""  # for the scheduler


class Job(NamedTuple):
    chain: Chain  # as its record will be, without jobs
    rows: Sequence[Row]
    text: str  # of the batch script


def command(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Do ``ezpz submit`` with these words; return what to print."""
    options, user = split(argv, SUBMIT_OPTIONS)
    if "help" in options:
        return help_page()
    if "version" in options:
        return __version__
    request = build_request(options, user, Submission)
    require_program(request.command)
    _refuse_contradictions(request)
    machine = _machine(request, env)
    job = _make_job(request, options, machine, env)
    if request.dry_run:
        return _explained(job, as_json=request.json)
    if not request.script or job.chain.limit > 1:
        _keep(job.chain, env)
    _write_script(job)
    if request.script and not request.chain:
        words = shlex.join(submit_words(job.chain, ""))
        return f"{request.script} is written; to submit it: {words}"
    return _submit(job, env)


def _refuse_contradictions(request: Submission) -> None:
    if request.until_done and request.chain:
        raise UsageError("--until-done and --chain: expected one of them; both make a chain")
    if request.script and request.chain:
        raise UsageError("--script: expected no --chain beside it, which submits; --until-done can")
    if request.hostfile:
        raise UsageError("--hostfile: the job's hosts are not known yet; expected -N")
    if request.time and request.signal_before >= request.time:
        raise UsageError(
            f"--signal-before {request.signal_before:g}: all of the job has {request.time} s "
            "(--time); expected less"
        )


def _is_here(request: Submission) -> bool:
    """Whether the job is to run here, not on a machine that is imagined."""
    return not (request.dry_run and request.machine)


def _machine(request: Submission, env: Mapping[str, str]) -> Machine:
    machine = get_machine_info({**env, "EZPZ_MACHINE": request.machine} if request.machine else env)
    if machine.scheduler == "none" and not request.machine:
        # No machine that we know, and no job's variables: what is installed decides.
        found = find_schedulers(env)
        if len(found) > 1:
            raise UsageError(
                "Slurm's and PBS's commands are both here; expected one scheduler; say which: "
                "--machine generic-slurm or --machine generic-pbs"
            )
        for each in found:
            machine = get_machine_info({**env, "EZPZ_MACHINE": f"generic-{each}"})
    if machine.scheduler == "none":
        raise UsageError(
            f"{machine.name} has no scheduler; expected Slurm's sbatch or PBS's qsub on PATH; to "
            "run it now: ezpz launch; to see a script for elsewhere: ezpz submit --dry-run "
            "--machine aurora"
        )
    return machine


def _make_job(
    request: Submission, options: Options, machine: Machine, env: Mapping[str, str]
) -> Job:
    scheduler, cwd = SCHEDULERS[machine.scheduler](env), os.getcwd()
    name = request.name or name_of(request.command)
    if _is_here(request):
        _check_command(request, env)
    rows = _rows(request, machine, scheduler, name)
    # A dry run leaves nothing behind, not even a number.
    chain_id = f"{name}-ID" if request.dry_run else f"{name}-{new_id(time.time())}"
    base = os.path.join(jobs_folder(env), chain_id)
    script = os.path.abspath(request.script) if request.script else f"{base}.sh"
    kind = "job"
    limit = request.until_done or request.chain or 1
    if request.until_done or request.chain:
        kind = "until-done" if request.until_done else "chain"
        how = "each queues the next" if request.until_done else "queued now, one after the other"
        rows.append(Row("jobs", f"up to {limit}", f"--{kind}: {how}, until it is done"))
    chain = Chain(
        id=chain_id, name=name, kind=kind, command=tuple(redact(list(request.command))),
        scheduler=scheduler.name, script=script,
        output=os.path.join(cwd, f"{name}.o%j"),
        options={
            "nodes": request.nodes or 1, "time": request.time,
            "queue": request.queue or None, "account": request.account or None,
        },
        limit=limit, start=iso_time(time.time()), progress_file=f"{base}.progress",
    )  # fmt: skip
    setup, why = _setup(request, machine, env)
    rows.append(Row("environment", "; ".join(setup), why))
    lines = ["#!/bin/bash -l", *(f"{scheduler.directive} {row.words}" for row in rows if row.words)]
    lines += [*setup, f"cd {_quoted(cwd)} || exit"]
    if given := env.get("EZPZ_STATE_DIR"):
        lines.append(f"export EZPZ_STATE_DIR={_quoted(os.path.abspath(given))}")
    if (request.spares or request.min_nodes) and scheduler.name == "slurm":
        lines.append("export SLURM_NO_KILL=set")  # so do the job's steps
    if limit > 1 or not request.script:
        lines.append(f"{CHAIN}={_quoted(f'{base}.json')} \\")
    # exec: a shell that the scheduler tells to end would take the ranks' grace with it.
    lines.append(" ".join(map(_quoted, ["exec", "ezpz-launch", *_launch_words(request, options)])))
    return Job(chain, rows, "\n".join([*lines, ""]))


def _rows(request: Submission, machine: Machine, scheduler: Scheduler, name: str) -> list[Row]:
    """Return what the scheduler is asked for; not what ``--submit-args`` asks for already."""
    given, words = keys_of(request.submit_args), dict(scheduler.words)
    if machine.queue_flag:
        words["queue"] = f"{machine.queue_flag}={{}}"
    for label in machine.submit_required:
        if not getattr(request, label) and given.isdisjoint(keys_of(words[label].split())):
            raise UsageError(f"--{label} is missing; {machine.name} refuses jobs without")
    if not given.isdisjoint(scheduler.array):
        raise UsageError(
            "--submit-args: a job of ezpz submit has one task; expected no "
            f"{' or '.join(scheduler.array)}; to make an array of its script: --script FILE, and "
            f"{scheduler.submit[0]} with {scheduler.array[0]}"
        )
    chunk, why = "", "-N" if request.nodes else "default"
    # Of a machine that we know a job has whole nodes.
    is_known = machine.devices_per_node or machine.cores_per_node
    if _is_here(request) and not is_known and "-l select" not in given:
        chunk, source = scheduler.chunk(request.nodes or 1)
        why += f"; {source}" if source else ""
    devices = machine.devices_per_node if "devices" in words else 0
    survives = request.spares or request.min_nodes
    asked: list[tuple[str, object, str]] = [
        ("name", name, "--name" if request.name else "of the command"),
        ("nodes", f"{request.nodes or 1}{chunk}", why),
        ("sharing", "none", "each node is the job's alone, and has one part of it"),
        ("devices", devices, f"devices_per_node of {machine.name}.toml"),
        ("time", request.time and clock(request.time), "--time"),
        *((label, getattr(request, label), f"--{label}") for label in _NAMED),
        ("output", f"{name}.o%j", "one file a job, written as it comes"),
        ("lost nodes", "survived" if survives else "", "--spares, --min-nodes"),
        ("requeue", "yes" if request.until_done or request.chain else "", "where preempted"),
    ]
    rows = [Row(n, str(value), why, words[n].format(value)) for n, value, why in asked if value]
    flags = filter(None, re.split(" (?=-)", " ".join(machine.submit_flags)))
    rows += [Row("flag", each, f"submit_flags of {machine.name}.toml", each) for each in flags]
    rows = [row for row in rows if given.isdisjoint(keys_of(row.words.split()))]
    if request.submit_args:
        own = shlex.join(request.submit_args)
        rows.append(Row("flags", own, "--submit-args", own))
    return rows


_NAMED = ("queue", "account", "after")  # options that the scheduler is told as they are


def _setup(request: Submission, machine: Machine, env: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the lines that make the job's environment what this one is, and why these."""
    if request.env_setup:
        return [f"source {_quoted(os.path.abspath(request.env_setup))}"], "--env-setup"
    own = env.get("EZPZ_MODULES")
    modules = machine.modules if own is None else own.split()
    lines = [f"module use {_quoted(path)}" for path in machine.module_paths if modules]
    lines += [f"module load {' '.join(map(_quoted, modules))}"] if modules else []
    if modules and machine.conda_environment:
        lines.append(f"conda activate {_quoted(machine.conda_environment)}")
    why = "" if not modules else f"{machine.name}.toml" if own is None else "EZPZ_MODULES"
    prefix, conda = sys.prefix, env.get("CONDA_EXE", "")
    activate = os.path.join(prefix, "bin", "activate")
    if prefix != sys.base_prefix and os.path.isfile(activate):
        lines.append(f"source {_quoted(activate)}")
    elif conda and os.path.isdir(os.path.join(prefix, "conda-meta")):
        root = os.path.dirname(os.path.dirname(conda))
        lines.append(f"source {_quoted(os.path.join(root, 'bin', 'activate'))} {_quoted(prefix)}")
    else:
        here = os.path.dirname(sys.executable)
        path = os.pathsep.join([here, env.get("PATH", os.defpath)])
        found = shutil.which("ezpz-launch", path=path)
        lines.append(f'export PATH={_quoted(os.path.dirname(found) if found else here)}:"$PATH"')
    return lines, " and ".join(filter(None, [why, "the Python of this ezpz"]))


_OF_THE_JOB = ("nodes", "dry-run", "json")  # options of the launch that a job has for itself


def _launch_words(request: Submission, options: Options) -> list[str]:
    """Return the options of the launch, as they were given, and the command."""
    words: list[str] = []
    ours = {each.name: each for each in OPTIONS if each.name not in _OF_THE_JOB}
    for name, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            if name in ours and each is not True:  # what may stand without a value has it attached
                flag, text = f"--{name}", str(each)
                words += [f"{flag}={text}"] if ours[name].bare_value else [flag, text]
            elif name in ours:
                words += [f"--{name}"]
    return [*words, *(["--"] if request.command[0][:1] == "-" else []), *request.command]


def _quoted(word: str) -> str:
    # sbatch refuses a line that ends with a carriage return, and obeys "#PBS" wherever one begins.
    if not re.search(r"[\r\n]", word):
        return shlex.quote(word)
    for each, escaped in (("\\", r"\\"), ("'", r"\'"), ("\r", r"\r"), ("\n", r"\n")):
        word = word.replace(each, escaped)
    return f"$'{word}'"


# What is looked at before it is queued.


def _check_command(request: Submission, env: Mapping[str, str]) -> None:
    words = request.command
    if request.env_setup and not os.path.isfile(request.env_setup):
        raise UsageError(f"--env-setup {request.env_setup}: no such file; expected a shell script")
    if not request.env_setup:
        require_command(words[0], env)
        for path in dict.fromkeys((sys.prefix, os.path.realpath(sys.prefix))):
            if why := _node_local(path, env):
                raise UsageError(
                    f"the environment {path} is on a disk of this host alone ({why}); expected one "
                    "that the nodes see; make it elsewhere, or set up another: --env-setup FILE; "
                    f"where the nodes do see it: EZPZ_SHARED_FOLDERS={path}"
                )
    is_python = os.path.basename(words[0]).startswith("python") and not {*words[1:2]} & {"-m", "-c"}
    script = next((word for word in words[1:] if word.endswith(".py")), "") if is_python else ""
    if script and not os.path.isfile(script):
        raise UsageError(
            f"{script}: no such file in {os.getcwd()}; expected the script to be run; the job "
            "begins in this folder"
        )


_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def _node_local(path: str, env: Mapping[str, str]) -> str:
    """Say what shows that other hosts do not see a path; empty where nothing does."""
    shared = filter(None, env.get("EZPZ_SHARED_FOLDERS", "").split(os.pathsep))
    if any(f"{path}/".startswith(f"{folder.rstrip('/')}/") for folder in shared):
        return ""
    if below := next((each for each in _LOCAL if f"{path}/".startswith(f"{each}/")), ""):
        return f"below {below}"
    kind = type_of(path)
    return kind if kind in _IN_MEMORY else ""


def _explained(job: Job, *, as_json: bool) -> str:
    chain = job.chain
    submit = submit_words(chain, "")
    if as_json:
        rows = {row.label: {"value": row.value, "why": row.why} for row in job.rows}
        return json.dumps({"submit": submit, "script": job.text, "because": rows}, indent=2)
    lines = ["would submit:", f"  {shlex.join(submit)}"]
    if chain.limit > 1:
        lines += ["and after that job, until it is done:"]
        lines += [f"  {shlex.join(submit_words(chain, 'JOB'))}"]
    lines += ["", f"with {chain.script}:", *(f"  {line}" for line in job.text.splitlines()), ""]
    return "\n".join([*lines, *format_decisions([row[:3] for row in job.rows])])


# Into the queue.


def _keep(chain: Chain, env: Mapping[str, str]) -> None:
    folder = jobs_folder(env)
    try:
        make_folder(folder)
        prune(folder)
        write(path_of(chain), dump(chain._asdict()))
    except OSError as error:
        raise LaunchError(unwritable(folder, error)) from error


def _write_script(job: Job) -> None:
    try:
        write(job.chain.script, job.text, 0o700)
    except OSError as error:
        raise LaunchError(
            f"{job.chain.script} cannot be written ({error.strerror or error}); expected a place "
            "for the batch script; name another: --script FILE"
        ) from error


def _submit(job: Job, env: Mapping[str, str]) -> str:
    chain = job.chain
    try:
        for _ in range(chain.limit if chain.kind == "chain" else 1):
            chain = queue_one(chain, env)
    except (LaunchError, SchedulerError):
        delete_jobs(chain, [each["id"] for each in chain.jobs], env)
        for path in (path_of(chain), chain.script):
            os.unlink(path)
        raise
    # At once, since the first may run by now: it waits until its number is there.
    change_chain(path_of(chain), jobs=chain.jobs, cluster=chain.cluster)
    ids = [each["id"] for each in chain.jobs]
    lines = [" ".join(ids), f"  script {chain.script}", f"  output {output_of(chain, ids[0])}"]
    if chain.cluster:
        lines.append(f"  cluster {chain.cluster}")
    return "\n".join(lines)


# The page that ``ezpz submit --help`` prints.

_PAGE = """\
usage: ezpz submit [OPTION...] [--] COMMAND [ARGUMENT...]

Queue a job, by Slurm or PBS, that starts COMMAND on every rank; its words are
not touched.

options of the job:
{}

options of the launch in it:
{}

examples:
  ezpz submit -N 4 --time 2h python train.py
  ezpz submit --until-done --signal-before 5m -N 4 --time 2h python train.py
  ezpz submit --dry-run -N 4 python train.py      the script and the command
  ezpz submit --dry-run --machine aurora -A PROJECT --time 1h python train.py"""


def help_page() -> str:
    launch = {option.name for option in OPTIONS if option.name not in _OF_THE_JOB and option.field}
    halves: tuple[list[str], list[str]] = [], []
    for option in SUBMIT_OPTIONS:
        flags = [f"-{option.short}"] if option.short else []
        flags += [f"--{option.name}", *re.findall("^--[^ ]+", option.aliases)]
        value = f"[{option.value}]" if option.bare_value else option.value
        words = f"{', '.join(flags)} {value}".rstrip()
        halves[option.name in launch].append(format_help_row(words, 28, option.help))
    return _PAGE.format(*("\n".join(lines) for lines in halves))
