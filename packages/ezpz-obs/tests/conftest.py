"""Real ranks that record and say what they see; and programs in a process of their own."""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("TIMEOUT", "30"))))
"""


LIBRARIES = ("WANDB_", "NETRC", "MLFLOW_", "TRACKIO_", "HF_")


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Whoever starts the tests from a job: they are one process, and say what they always say."""
    own = {n for n in clean(os.environ) if not n.startswith(LIBRARIES)} | {"OMP_NUM_THREADS"}
    for name in os.environ.keys() - own:
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
        env.pop("PYTHONUNBUFFERED", None)  # a user's standard error is buffered
        done = subprocess.run(
            command, cwd=tmp_path, env=env, text=True, check=False,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **given},
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        return done

    return run


@pytest.fixture
def warned(caplog):
    """Return what was logged from WARNING upward, as texts; not that a number is not finite."""

    def warned():
        found = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        return [
            text for text in found if " is nan at step" not in text and "inf at step" not in text
        ]

    return warned


@pytest.fixture(scope="session")
def preloaded():
    # FSDP, DTensors and profiles need the latter, which is a second for each rank.
    return ["ezpz_obs._across", "torch._dynamo"]


@pytest.fixture
def ranks(forked, tmp_path):
    """Start ranks of a program, and return what became of each."""
    program = tmp_path / "program.py"

    def start(code, size, *, set_up=True, **given):
        program.write_text(BEGIN + (SET_UP if set_up else "") + textwrap.dedent(code))
        return [Rank(*one) for one in forked(size, "", check=False, program=program, **given)]

    return start


class Server:
    """As much of a W&B server as a run needs to start; hangs at what it is told."""

    BUCKET = {  # noqa: RUF012
        "id": "b", "name": "n", "displayName": "d", "description": "", "config": "{}",
        "sweepName": None, "historyLineCount": 0,
        "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "u"}},
    }  # fmt: skip
    ANSWERS = {  # noqa: RUF012
        "UpsertBucket": {"upsertBucket": {"bucket": BUCKET, "inserted": True}}
    }
    VIEWER = {  # noqa: RUF012
        "viewer": {"id": "x", "username": "u", "entity": "u", "flags": "{}", "email": "",
                   "teams": {"edges": []}}
    }  # fmt: skip

    def __init__(self):
        self.hangs_at = lambda path, name: True
        self.status = 200
        self.over = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                outer.answer(self)

            do_GET = do_PUT = do_POST  # noqa: N815

            def log_message(self, *_): ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.block_on_close = False
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, request):
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        try:
            name = json.loads(body).get("operationName", "")
        except ValueError:
            name = ""
        if self.hangs_at(request.path, name):
            self.over.wait()
            return
        text = json.dumps({"data": self.ANSWERS.get(name, self.VIEWER)}).encode()
        request.send_response(self.status)
        request.send_header("content-type", "application/json")
        request.send_header("content-length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.over.set()
    server.http.shutdown()
    server.http.server_close()


class Rank:
    """What became of one rank; what it said is None where it did not come to its end."""

    def __init__(self, status, out, err):
        self.status, self.err = status, err
        self.said = json.loads(out.splitlines()[-1]) if out else None
