"""Real ranks that record and say what they see; and programs in a process of their own."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import textwrap

import pytest
from forked_ranks import clean_env, fork_server, prelude, user_env
from forked_ranks import ranks as forked
from surroundings import clean

from ezpz_obs._context import NOW

# Without them there is nothing to test in that folder; test_extras.py says so.
EXTRAS = ("jinja2", "matplotlib", "plotext", "pyarrow", "xarray")
collect_ignore = [] if all(map(importlib.util.find_spec, EXTRAS)) else ["reports"]

BEGIN = """
import atexit, json, os, sys, torch, torch.distributed as dist
RANK, SIZE, said = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), []
say = said.append
atexit.register(lambda: print(json.dumps(said)))
"""
"""What each program begins with; the last line that it prints is what it ``say``s."""
SET_UP = """
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
"""


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Whoever starts the tests from a job: they are one process, and say what they always say."""
    for name in os.environ.keys() - clean(os.environ).keys() - {"OMP_NUM_THREADS"}:
        monkeypatch.delenv(name)
    monkeypatch.setattr(NOW, "step", None)


@pytest.fixture
def rank_1(monkeypatch):
    """Be the second rank of two."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def python(tmp_path):
    """Run a program in a process of its own, which ends with this status."""

    def run(code, *words, status=0, shell="", **given):
        """In a shell such as ``2>&-``, it has no standard error."""
        command = [sys.executable, "-c", textwrap.dedent(code), *map(str, words)]
        if shell:
            command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
        env = {**os.environ, **given.pop("env", {})}
        done = subprocess.run(
            command, cwd=tmp_path, env=env, text=True, check=False,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given},
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return done

    return run


@pytest.fixture
def warned(caplog):
    """Return what was logged from WARNING upward, as texts."""
    return lambda: [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


@pytest.fixture(scope="session")
def preloaded():
    # FSDP, DTensors and profiles need the latter, which is a second for each rank.
    return ["ezpz_obs._across", "torch._dynamo"]


@pytest.fixture
def ranks(forked, tmp_path):
    """Start ranks of a program, and return what became of each."""
    program = tmp_path / "program.py"

    def start(code, size, *, set_up=True, wait=None):
        program.write_text(BEGIN + (SET_UP if set_up else "") + textwrap.dedent(code))
        return [Rank(*one) for one in forked(size, "", check=False, program=program, wait=wait)]

    return start


class Rank:
    """What became of one rank; what it said is None where it did not come to its end."""

    def __init__(self, status, out, err):
        self.status, self.err = status, err
        self.said = json.loads(out.splitlines()[-1]) if out else None
