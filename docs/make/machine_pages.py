"""One page a machine, from its TOML file: facts, their standing, and the command that is run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import ezpz_launch
from ezpz_topo import Machine, known_machines

# Machine's fields, and what a reader calls them.
FACTS = {
    "site": "site",
    "scheduler": "scheduler",
    "launcher": "launcher",
    "nodes": "nodes",
    "devices_per_node": "devices per node",
    "cores_per_node": "CPU cores per node",
    "device_type": "device type",
    "backends": "backends, best first",
    "reserved_cores": "cores that no rank may use",
    "launcher_flags": "launcher's flags",
    "submit_flags": "flags of a job",
    "submit_required": "jobs are refused without",
    "queue_flag": "flag of the site's queues",
    "hsn_suffix": "name on the fast network",
    "module_paths": "`module use`",
    "modules": "`module load`",
    "conda_environment": "`conda activate`",
    "proxy": "proxy of the compute nodes",
}


def machine_pages() -> dict[str, str]:
    """The text of each machine's page, by name; sites' machines first, the generic ones last."""
    machines = known_machines({}).values()
    ordered = sorted(machines, key=lambda machine: (machine.site == "any", machine.name))
    return {machine.name: machine_page(machine) for machine in ordered}


def machine_page(machine: Machine) -> str:
    """The Markdown of one machine's page."""
    return "\n".join([*_head(machine), *_command(machine), *_facts(machine), *_tables(machine)])


def _head(machine: Machine) -> Iterator[str]:
    file = "/".join(Path(machine.path).parts[-3:])
    yield f"# {machine.name}\n"
    if machine.site == "any":
        yield "Taken where no known machine matched: what the file leaves open the host tells.\n"
    else:
        yield "Not run on this machine yet: the facts below are read, not measured.\n"
    yield f"- **Facts as of** {machine.date}, in `{file}`"
    for source in machine.source:
        yield f"- **Source** {f'<{source}>' if source.startswith('http') else source}"
    if "*" in machine.predecessor:
        yield "- **All of it** comes from the predecessor project only"
    yield ""
    if machine.advice:
        yield '!!! warning "Before the first job"\n'
        yield from (f"    - {_text(sentence)}" for sentence in machine.advice)
        yield ""


def _command(machine: Machine) -> Iterator[str]:
    """What ezpz-launch prints for this machine, word for word but for its own folder."""
    nodes = [] if machine.scheduler == "none" else ["-N", "2"]
    words = ["--dry-run", "--machine", machine.name, *nodes, "python", "train.py"]
    job_free = patch.dict(os.environ, {"PATH": os.environ["PATH"]}, clear=True)
    with job_free, redirect_stdout(StringIO()) as out:
        if ezpz_launch.main(words):
            raise SystemExit(f"ezpz-launch {' '.join(words)} failed")
    printed = re.sub(r"\S*/(ezpz_launch/)", r"…/\1", out.getvalue())
    yield "## What is run\n"
    yield f"```bash\nezpz-launch {' '.join(words)}\n```\n"
    yield f"```text\n{printed.rstrip()}\n```\n"
    yield "The part of a path before `…` is where ezpz-launch is installed.\n"


def _facts(machine: Machine) -> Iterator[str]:
    yield "## Facts\n"
    yield "| | | |\n|---|---|---|"
    for name, label in FACTS.items():
        value = getattr(machine, name)
        if value not in (None, "", ()):
            yield f"| {label} | {_value(value)} | {_standing(machine, name)} |"
    if machine.default_cpu_bind:
        label, name = "bind list that is used", machine.default_cpu_bind
        yield f"| {label} | `{name}` | {_standing(machine, 'default_cpu_bind')} |"
    yield ""
    if recognised := sorted({key for key in machine.inferred if key.startswith("match.")}):
        yield "Recognised also by what is inferred: " + ", ".join(f"`{k[6:]}`" for k in recognised)
        yield ""


def _tables(machine: Machine) -> Iterator[str]:
    if machine.cpu_bind:
        yield "## CPU binding\n"
        for name, ranges in machine.cpu_bind.items():
            standing = _standing(machine, f"cpu_bind.{name}")
            yield f"`{name}`{f' ({standing})' if standing else ''}, cores of each local rank:\n"
            yield f"```text title='cores'\n{_wrapped(ranges)}\n```\n"
    if machine.environment:
        yield "## Environment of every rank\n"
        yield from _variables(machine.environment, machine, "environment")
    yield from _options(machine)


def _options(machine: Machine) -> Iterator[str]:
    if not machine.options:
        return
    yield "## Options\n"
    yield "Used only when asked for: `ezpz-launch --option NAME`.\n"
    for name, option in machine.options.items():
        standing = _standing(machine, f"options.{name}")
        yield f"### {name}\n"
        yield f"For: {_text(option.why)}.{f' ({standing})' if standing else ''}\n"
        for label in ("flags", "modules"):
            if words := getattr(option, label):
                yield f"- {label}: {_value(words)}"
        for label in ("backend", "cpu_bind"):
            if word := getattr(option, label):
                yield f"- {label}: `{word}`"
        yield ""
        if option.environment:
            yield from _variables(option.environment, machine, f"options.{name}.environment")


def _variables(variables: Mapping[str, str], machine: Machine, key: str) -> Iterator[str]:
    yield "| variable | value | |\n|---|---|---|"
    for name, value in variables.items():
        yield f"| `{name}` | `{value}` | {_standing(machine, f'{key}.{name}')} |"
    yield ""


def _standing(machine: Machine, key: str) -> str:
    """Whether a value is our conclusion or the predecessor's; of a table, also of all in it."""
    above = {key.rsplit(".", cut)[0] for cut in range(key.count(".") + 1)}
    if above & set(machine.inferred):
        return "inferred"
    return "predecessor project only" if above & {*machine.predecessor} else ""


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(f"`{part}`" for part in value)
    return f"`{value}`" if isinstance(value, str) else str(value)


def _text(sentence: str) -> str:
    """A sentence of the file, with what looks like code as code."""
    return re.sub(r"(?<![\w`])(--[\w-]+(?:=\S*\w)?|[A-Z]+(?:_[A-Z]+)+(?:=\w+)?)", r"`\1`", sentence)


def _wrapped(ranges: tuple[str, ...]) -> str:
    return "\n".join("  ".join(ranges[start : start + 6]) for start in range(0, len(ranges), 6))
