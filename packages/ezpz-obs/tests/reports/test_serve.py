"""The command's own server, asked by a client and by a browser."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

# Tests in a shell's background have Ctrl-C ignored, and so would what they start.
MAIN = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from ezpz_obs._cli import main; sys.exit(main())"
)


@pytest.fixture
def serve(tmp_path):
    """Start the command, and return its process and the address that it says."""
    started = []

    def start(*words):
        command = [sys.executable, "-c", MAIN, "report", *map(str, words), "--serve"]
        started.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
        return started[-1], started[-1].stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ask(url, **headers):
    """Return status, ETag and text."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return answer.status, answer.headers["ETag"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["ETag"], error.read().decode()


def add(run, record):
    with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def test_it_is_live_and_only_for_who_has_the_address(serve, write_run, records):
    runs = [write_run(*records(range(9), loss=1.0), folder=name, run=name) for name in "ab"]
    process, url = serve(*runs)
    host, port, token = re.fullmatch(r"http://([\d.]+):(\d+)/([\w-]{30,})/", url).groups()
    assert host == "127.0.0.1"
    # No other address of this host has it.
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", int(port)))
    for other in ("", f"{token[:-1]}/", token, f"{token}/../", f"{token}/x", "%2e%2e/"):
        assert ask(f"http://{host}:{port}/{other}") == (404, "", "not found")
    status, mark, page = ask(url)
    assert status == 200
    assert "2 runs compared" in page
    assert "connect-src 'self'" in page
    assert ask(url, **{"If-None-Match": mark}) == (304, mark, "")
    add(runs[1], {"step": 9, "time": 1.732e9 + 9, "loss": 0.5, "new": 7.0})
    status, after, page = ask(url, **{"If-None-Match": mark})
    assert (status, after != mark) == (200, True)
    assert "new" in re.findall(r"<figcaption><bdi>([^<]*)</bdi>", page)
    # A run that is removed is an answer, not the server's end.
    (runs[0] / "metrics.jsonl").rename(runs[0] / "aside")
    assert ask(url)[0] == 503
    (runs[0] / "aside").rename(runs[0] / "metrics.jsonl")
    assert ask(url)[0] == 200
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert not (runs[0] / "report").exists()


def test_a_browser_shows_what_is_new(serve, write_run, records, browser):
    run = write_run(*records(range(9), loss=1.0))
    _, url = serve(run)
    asked = []

    class Between(BaseHTTPRequestHandler):
        """Hands on what the browser asks; once the page is there, the run grows."""

        def do_GET(self):
            mark = {"If-None-Match": self.headers["If-None-Match"] or ""}
            status, after, page = ask("/".join(url.split("/")[:3]) + self.path, **mark)
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("ETag", after or "")
            self.end_headers()
            self.wfile.write(page.encode())
            asked.append((self.path, status))
            if asked == [(self.path, 200)]:
                add(run, {"step": 9, "time": 1.732e9 + 9, "loss": 0.5, "new": 7.0})

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Between) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = f"http://127.0.0.1:{server.server_port}/{url.split('/', 3)[3]}"
        found = browser(page, "--dump-dom", "--virtual-time-budget=8000")
        server.shutdown()
    assert asked[0][1] == 200
    assert "<bdi>new</bdi>" in found
    assert found.count('class="tools small"') == 1
    assert 'class="live">Live' in found


def test_a_port_that_is_taken(serve, command, write_run, records):
    run = write_run(*records(range(9), loss=1.0))
    port = serve(run)[1].split(":")[2].partition("/")[0]
    done = command("report", run, f"--port={port}", "--serve", status=1)
    assert done.stdout == ""
    assert f"port {port}: " in done.stderr
