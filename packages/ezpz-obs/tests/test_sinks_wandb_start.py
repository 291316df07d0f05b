import json
import os
import pty
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ezpz_obs import SinkError, setup_wandb, verify_wandb

pytest.importorskip("wandb")

KEY = "a" * 40
PROMISED, BUSY = 10.0, 10.0
"""Seconds that start and end take at most, and what a busy machine adds."""
PROGRAM = """
import json, logging, sys, time
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
from ezpz_obs import setup_wandb, verify_wandb
began = time.time()
run = setup_wandb("tests", outdir="out", config={"lr": 0.1})
took = time.time() - began
if run is not None:
    run.log({"loss": 1.0})
print("FOUND" + json.dumps({
    "took": took, "offline": None if run is None else run.offline, "verify": verify_wandb(),
    "project": None if run is None else run.project,
}), flush=True)
"""


class Server:
    """As much of a W&B server as a run needs to start; hangs at what it is told."""

    ANSWERS = {  # noqa: RUF012
        "UpsertBucket": {
            "upsertBucket": {
                "bucket": {
                    "id": "b", "name": "n", "displayName": "d", "description": "", "config": "{}",
                    "sweepName": None, "historyLineCount": 0,
                    "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "u"}},
                },
                "inserted": True,
            }
        }
    }  # fmt: skip
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
            self.over.wait(120)
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


@pytest.fixture
def clean(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("WANDB_", "NETRC")):
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def start(tmp_path, clean):
    def start(**env):
        lines, printed = [], 0.0
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM], cwd=tmp_path, text=True,
            env={**os.environ, "EZPZ_SINK_SECONDS": "120", **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            for line in process.stdout:
                lines.append(line)
                if line.startswith("FOUND"):
                    printed = time.monotonic()
            errors = process.stderr.read()
        took = time.monotonic() - printed
        assert process.returncode == 0, errors
        found = json.loads(next(line[5:] for line in lines if line.startswith("FOUND")))
        warned = [line for line in errors.splitlines() if line.startswith("WARNING")]
        return {**found, "exit": took, "warned": warned, "errors": errors}

    return start


def test_offline_without_credentials(start, tmp_path):
    found = start()
    assert found["offline"]
    assert found["project"] == "tests"
    assert not found["verify"]
    assert not found["warned"]
    assert list(tmp_path.glob("out/wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize(
    "variables", [{"WANDB_MODE": "disabled"}, {"WANDB_DISABLED": "true"}, {"RANK": "1"}]
)
def test_nothing_is_started_where_it_is_disabled_and_on_other_ranks(
    clean, tmp_path, monkeypatch, variables
):
    ranks = {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (variables | (ranks if "RANK" in variables else {})).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    assert setup_wandb("p") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]


def test_online_where_the_server_answers(start, server):
    server.hangs_at = lambda path, name: False
    server.ANSWERS = server.ANSWERS | {"CreateRunFiles": {"createRunFiles": None}}
    server.hangs_at = lambda path, name: name == "CreateRunFiles"
    found = start(WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
    assert found["offline"] is False
    assert found["verify"]
    assert not found["warned"]


def test_a_server_that_never_answers(start, server):
    found = start(WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY, EZPZ_SINK_SECONDS="10")
    assert found["offline"]
    assert found["took"] < PROMISED + BUSY
    assert found["exit"] < PROMISED + BUSY
    (said,) = found["warned"]
    assert "does not answer within 4 s; offline: send it later by `wandb sync`" in said


def test_a_server_that_hangs_after_its_first_answer(start, server):
    server.hangs_at = lambda path, name: name != ""
    found = start(WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY, EZPZ_SINK_SECONDS="10")
    assert found["offline"] is None
    assert found["took"] < PROMISED + BUSY
    assert found["exit"] < PROMISED + BUSY
    (said,) = found["warned"]
    assert "going on without W&B" in said


def test_a_server_that_hangs_at_the_end(start, server):
    server.hangs_at = lambda path, name: "file_stream" in path or name == "CreateRunFiles"
    found = start(WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
    assert found["offline"] is False
    assert found["exit"] < PROMISED + BUSY


def test_a_time_that_is_none(clean, monkeypatch):
    monkeypatch.setenv("EZPZ_SINK_SECONDS", "soon")
    with pytest.raises(SinkError, match=r"EZPZ_SINK_SECONDS='soon'; expected seconds above 3"):
        setup_wandb("tests")


def test_nobody_listens(start):
    found = start(WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY=KEY)
    assert found["offline"]
    (said,) = found["warned"]
    assert "http://127.0.0.1:9 does not answer (ConnectionError); offline" in said


def test_a_key_that_is_refused(start, server):
    server.hangs_at = lambda path, name: False
    server.status = 401
    found = start(WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY)
    assert found["offline"]
    (said,) = found["warned"]
    assert "refuses the API key of WANDB_API_KEY (401)" in said


def test_a_home_that_cannot_be_written(start, tmp_path):
    (tmp_path / "file").touch()
    found = start(HOME=str(tmp_path / "file" / "home"))
    assert found["offline"]
    assert not found["warned"]


@pytest.mark.parametrize("key", ["", "abc"], ids=["no key", "no real key"])
def test_nobody_is_asked_on_a_terminal(clean, server, tmp_path, key):
    server.hangs_at = lambda path, name: False
    env = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": key}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=theirs, stdout=theirs, stderr=theirs, env=env,
        cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while block := os.read(ours, 65536):
            shown += block
    except OSError:  # the terminal is closed when the process has ended
        pass
    os.close(ours)
    assert process.wait(120) == 0
    assert b'"offline": true' in shown
    assert b"Enter your" not in shown


@pytest.mark.parametrize(
    ("env", "netrc", "verified"),
    [
        ({}, None, False),
        ({"WANDB_API_KEY": KEY}, None, True),
        ({"WANDB_API_KEY": " "}, None, False),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, None, False),
        ({"WANDB_API_KEY": KEY, "WANDB_DISABLED": "1"}, None, False),
        ({"WANDB_API_KEY": KEY, "WANDB_DISABLED": "false"}, None, True),
        ({}, f"machine api.wandb.ai login user password {KEY}", True),
        ({}, f"machine example.org login user password {KEY}", False),
        ({"WANDB_BASE_URL": "https://w.org/"}, f"machine w.org login user password {KEY}", True),
        ({}, "machine api.wandb.ai login", False),
        ({"WANDB_IDENTITY_TOKEN_FILE": "/token"}, None, True),
    ],
)  # fmt: skip
def test_verify_wandb(clean, monkeypatch, env, netrc, verified):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    if netrc is not None:
        (clean / ".netrc").write_text(netrc)
        (clean / ".netrc").chmod(0o600)
    assert verify_wandb() is verified


def test_the_server_that_wandb_login_kept(clean, monkeypatch):
    from ezpz_obs._sinks.wandb import find_server

    assert find_server() == "https://api.wandb.ai"
    folder = clean / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert find_server() == "https://wandb.example.org"
    monkeypatch.setenv("WANDB_BASE_URL", "http://other/")
    assert find_server() == "http://other"


def test_a_run_of_ones_own_id_goes_offline_too(start, server):
    """W&B's service has the id of the start that failed still in use."""
    server.hangs_at = lambda path, name: False
    server.status = 404
    found = start(WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY, WANDB_RUN_ID="mine")
    assert found["offline"]
    (said,) = found["warned"]
    assert "offline: send it later by `wandb sync`" in said
