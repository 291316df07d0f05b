"""What the shell blocks of pages may hold, and what of it is run here."""

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

from tests.docs.blocks import ROOT

# Programs of others: the shell's grammar is all that is checked of them.
FOREIGN = {
    "accelerate", "cd", "conda", "cp", "deepspeed", "echo", "exec", "exit", "export", "fi", "git",
    "grep", "if", "mkdir", "module", "mpiexec", "mpirun", "nohup", "pgrep", "py-spy", "qsub",
    "sacct", "salloc", "sbatch", "sbcast", "scancel", "scontrol", "srun", "tail", "tar", "then",
    "torchrun", "towncrier", "unset", "uv",
}  # fmt: skip

_PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    for path in ROOT.glob("packages/*/pyproject.toml")
}
_COMMANDS = {
    name: target
    for project in _PROJECTS.values()
    for name, target in project.get("scripts", {}).items()
}


def commands_of(code, *, console=False):
    """The words of each simple command of a block; of a console, what stands behind a ``$``."""
    if console:
        code = "\n".join(line[2:] for line in code.splitlines() if line.startswith("$ "))
    found = []
    for line in code.replace("\\\n", " ").splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        reader.commenters = "#"
        reader.whitespace_split = True
        words = []
        for word in [*reader, ";"]:
            if word.strip(";&|"):
                words.append(word)
            elif words:
                found.append(words)
                words = []
    return [_after_assignments(words) for words in found]


def check_syntax(code):
    """What bash says of a block that it cannot parse."""
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False)
    return done.stderr


def problem_of(words, folder):  # noqa: PLR0911  # one a kind of command
    """What is wrong with a command; empty where all that can be checked of it holds."""
    first, *rest = words
    if first in ("then", "else", "do", "time") and rest:
        return problem_of(rest, folder)
    if first in _COMMANDS:
        return _problem_of_ours(first, rest, folder)
    if first == "pip" or words[:3] == ["python", "-m", "pip"]:
        return _problem_of_install(rest)
    if first == "python":
        return _problem_of_module(rest)
    if first == "hatch":
        return _problem_of_hatch(rest)
    if first == "source":
        known = rest[0].endswith("/bin/activate") or (ROOT / rest[0]).is_file()
        return "" if known else "no such file"
    if first.startswith(("scripts/", "benchmarks/")):
        return "" if (ROOT / first).is_file() else "no such file"
    if first.startswith("ezpz_"):
        shell = (ROOT / "utils.sh").read_text(encoding="utf-8")
        return "" if f"\n{first}()" in shell else "utils.sh has no such function"
    return "" if first in FOREIGN else "no known command"


def _after_assignments(words):
    while len(words) > 1 and re.match(r"\w+=", words[0]):
        words = words[1:]
    return words


def _problem_of_ours(name, words, folder):
    for word, instead in {"ezpz": "", "launch": "ezpz-launch"}.items():
        if name == "ezpz" and words[:1] == [word]:
            return _problem_of_ours(instead, words[1:], folder)
    if name == "ezpz-launch" and words[:1] and words[0] in ("submit", "jobs", "follow", "kill"):
        return _problem_of_options(name, words)
    if name == "ezpz-launch" and words[:1] != ["launches"]:
        is_short = {"--dry-run", "--help", "--version"} & set(words)
        words = words if is_short else ["--dry-run", *words]
    if name in ("ezpz", "ezpz-test") and not {"--help", "--version"} & set(words):
        return _problem_of_options(name, words)
    run = [word for word in words[1:2] if not word.startswith("-")]
    if name == "ezpz-obs" and words and not all(Path(folder, word).exists() for word in run):
        return _problem_of_options(name, words)
    status, said = _run(name, *words, folder=folder)
    return f"status {status}\n{said}" if status else ""


def _problem_of_options(name, words):
    """Its help page has the sub-command and every option; the command itself takes too long."""
    sub = words[:1] if name != "ezpz-test" and words[:1] and words[0][0] != "-" else []
    status, page = _run(name, *sub, "--help")
    lacking = [
        option[0]
        for word in words
        if (option := re.match(r"--?[a-z][\w-]*", word))
        and option[0].replace("_", "-") not in page.replace("_", "-")
    ]
    if status or lacking:
        return f"{' '.join([name, *sub, '--help'])}: status {status}, lacks {lacking}"
    return ""


@cache
def _run(name, *words, folder=ROOT):
    """Run a command of ours by what its console script calls; a page of help, once for all."""
    module, _, function = _COMMANDS[name].partition(":")
    code = f"import sys; from {module} import {function}; sys.exit({function}())"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def _problem_of_install(words):
    for word in words:
        name, address, folder = word.partition(" @ git+URL#subdirectory=packages/")
        match = re.fullmatch(r"(ezpz[\w-]*)(?:\[([\w,-]+)\])?", name)
        if not match:
            continue
        if address and folder != match[1]:
            return f"{match[1]} is not in packages/{folder}"
        project = _PROJECTS.get(match[1])
        if project is None:
            return f"{match[1]} is no distribution of ours"
        extras = set(match[2].split(",") if match[2] else ())
        if lacking := extras - set(project.get("optional-dependencies", {})):
            return f"{match[1]} has no extra {', '.join(sorted(lacking))}"
    return ""


def _problem_of_module(words):
    if words[:1] != ["-m"] or not words[1].startswith("ezpz"):
        return ""
    return "" if importlib.util.find_spec(words[1]) else f"no module {words[1]}"


def _problem_of_hatch(words):
    known = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]
    env, _, script = words[1].partition(":") if words[:1] == ["run"] else ("", "", "")
    scripts = known.get(env, {}).get("scripts", {})
    return "" if script in scripts else f"hatch.toml has no {' '.join(words)}"
