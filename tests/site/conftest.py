"""The site, built once; and a browser that looks at it."""

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKE = ROOT / "docs" / "make"


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder with ``pages`` and ``site``, built as a person builds it: warnings are errors."""
    out = tmp_path_factory.mktemp("docs")
    sources = os.pathsep.join(map(str, ROOT.glob("packages/*/src")))
    done = subprocess.run(
        [sys.executable, str(MAKE), "build", f"--out={out}"], capture_output=True, text=True,
        check=False, env={**os.environ, "PYTHONPATH": sources},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture
def in_browser(built, tmp_path):
    """Run a script in a page beside the site's; it ends by ``tell(value)``, which is returned."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None and not os.environ.get("CI"):
        pytest.skip("Chromium is not installed")
    told = []
    came = threading.Event()
    page = ""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            """Say nothing."""

        def do_GET(self):
            if self.path != "/probe":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())
            return None

        def do_POST(self):
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            came.set()

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request, client_address):
            """A browser that has seen enough of a file hangs up."""

    site = functools.partial(Handler, directory=str(built / "site"))
    with Server(("127.0.0.1", 0), site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def run(script):
            nonlocal page
            tell = "tell = value => fetch('/', {method: 'POST', body: JSON.stringify(value)});"
            tell += "onerror = message => tell(message);"
            page = f"<!doctype html><body><script>{tell}{script}</script></body>"
            process = subprocess.Popen(
                [
                    str(chromium), "--headless", "--no-sandbox", "--disable-gpu",
                    "--remote-debugging-port=0", f"--user-data-dir={tmp_path / 'profile'}",
                    "--window-size=1600,1000", f"http://127.0.0.1:{server.server_port}/probe",
                ],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            try:
                assert came.wait(), "the browser told nothing"
            finally:
                process.terminate()
                process.wait()
            came.clear()
            return told.pop()

        yield run
        server.shutdown()
