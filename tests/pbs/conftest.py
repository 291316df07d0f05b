"""A real PBS for a session, with an environment of ours in its user's shared home.

Where PBS_EXEC says that one is installed, its user is who calls, and what needs an operator or
another host is skipped. EZPZ_TEST_PBS names a command for all of it, with these verbs; hosts are
pbs-0001 (server, login) and x1n0 to x1n2 (4 cores each), and alice is a user on all of them:
    on HOST @alice TEXT     run TEXT in a login shell of alice, with our standard input
    sub TEXT [OPTION...]    submit a job of alice (qsub's options); print its id
    wait ID                 until it has ended
    lose HOST, find HOST    take a node's link down, and up
"""

import io
import os
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import time
from importlib.metadata import distribution
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
OURS = ("ezpz-topo", "ezpz-launch")
OTHERS = ("fire", "termcolor", "mpich", "mpi4py")
SERVER = "pbs-0001"


class Pbs:
    """Jobs of alice, and what she sees on a host."""

    def __init__(self, command):
        self._command = shlex.split(command)
        # A folder that all hosts share; in its ``env`` is a virtual environment with ezpz-launch.
        self.home = f"{self.run('on', SERVER, '@alice', 'echo ~').strip()}/ezpz-tests-{os.getpid()}"
        os.environ["EZPZ_TEST_HOME"] = self.home  # for tests/pbs/site
        self.jobs = []
        self.lost = set()

    def run(self, *words, stdin=b"", timeout=500):
        """Run the command with a verb and its words; return what it prints."""
        ended = subprocess.run(
            [*self._command, *words], input=stdin, capture_output=True, timeout=timeout, check=False
        )
        said = ended.stdout.decode(errors="replace")
        if ended.returncode == 77:
            pytest.skip(said.strip())
        assert ended.returncode == 0, (words, ended.returncode, said, ended.stderr.decode())
        return said

    def manage(self, *orders, **more):
        """Have qmgr do something, as an operator."""
        each = " && ".join(f"qmgr -c {shlex.quote(order)}" for order in orders)
        self.run("on", SERVER, "sh", "-c", f". /etc/profile; {each}", **more)

    def on(self, host, text, **more):
        """Run a text on a host in a login shell of alice; return what it prints."""
        return self.run("on", host, "@alice", text, **more)

    def sub(self, text, *options):
        """Submit a job that runs a text in the environment; return its id."""
        begin = f". {self.home}/env/bin/activate; cd {self.home}; "
        # -f: no helper of qsub in /var/tmp, which may be another PBS's.
        options = ("-f", "-j", "oe", "-l", "place=scatter", "-l", "walltime=0:05:00", *options)
        job = self.run("sub", begin + text, *options).split()[-1]
        self.jobs.append(job)
        return job

    def output(self, job):
        """Return what a job has written up to now."""
        # Of this session: a server that was installed again counts from the same number.
        of_job = f"-name '*.o{job.partition('.')[0]}' -newer {self.home}/env/pyvenv.cfg"
        return self.on(SERVER, f"find ~ {self.home} -maxdepth 1 {of_job} -exec cat {{}} +")

    def ended(self, job, timeout=180):
        """Wait for a job's end; return what it has written."""
        self.run("wait", job, timeout=timeout)
        return self.output(job)

    def writes(self, job, words, timeout=120):
        """Wait until a job has written these words; return what it has written."""
        until = time.monotonic() + timeout
        while words not in (said := self.output(job)):
            assert time.monotonic() < until, (words, said)
            time.sleep(0.2)
        return said

    def write(self, name, text):
        """Write a file in the shared folder; return its path."""
        path = f"{self.home}/{name}"
        self.on(SERVER, f"cat >{shlex.quote(path)}", stdin=text.encode())
        return path

    def lose(self, host):
        """Take a node's link down, until the test ends."""
        self.lost.add(host)
        self.run("lose", host)

    def find(self, host):
        """Bring a node's link up again."""
        self.run("find", host)

    def reset(self):
        """Find the lost nodes, and delete the jobs."""
        for host in self.lost:
            self.find(host)
        if self.jobs:
            self.on(SERVER, f"qdel -W force {' '.join(self.jobs)} >/dev/null 2>&1 || true")
        if self.lost:
            _until_nodes_are_back(self)
        self.jobs, self.lost = [], set()


@pytest.fixture
def impatient(pbs):
    """A server that soon gives up a node that it finds down; to find it takes it 100 s."""
    pbs.manage("set server node_fail_requeue=10")
    yield
    pbs.manage("set server node_fail_requeue=310")  # its default


def _until_nodes_are_back(pbs):
    until = time.monotonic() + 120
    while "down" in (said := pbs.on(SERVER, "pbsnodes -aS")):
        assert time.monotonic() < until, said
        time.sleep(1)


@pytest.fixture(scope="session")
def pbs_session():
    of_site = str(Path(__file__).with_name("site")) if os.environ.get("PBS_EXEC") else ""
    command = os.environ.get("EZPZ_TEST_PBS") or of_site
    if not command:
        pytest.skip("no PBS here: neither PBS_EXEC nor EZPZ_TEST_PBS is set")
    pbs = Pbs(command)
    python = f"python3.{sys.version_info.minor}"
    pbs.on(
        SERVER,
        f"rm -rf {pbs.home} && mkdir -p {pbs.home} && cd {pbs.home} && "
        f'"$(command -v {sys.executable} {python} | head -n 1)" -m venv --without-pip env && '
        "tar x -C env",
        stdin=_environment(python, f"{pbs.home}/env"),
    )
    yield pbs
    pbs.on(SERVER, f"rm -rf {pbs.home}")


@pytest.fixture(scope="session")
def ours_there(pbs_session):
    """Let the environment there find torch and our packages here, where its hosts see them."""
    places = [sysconfig.get_path("purelib"), *map(str, sorted(PACKAGES.glob("*/src")))]
    site = f"{pbs_session.home}/env/lib/{Path(places[0]).parent.name}/site-packages"
    pbs_session.on(SERVER, f"cat >{site}/here.pth", stdin="\n".join(places).encode())
    said = pbs_session.on("x1n0", f"{pbs_session.home}/env/bin/python -c 'import torch' 2>&1 ||:")
    if said:
        pytest.skip(f"the hosts of this PBS see no torch of ours: {said.splitlines()[-1]}")


@pytest.fixture
def pbs(pbs_session):
    """The PBS; what a test submits or loses there ends with it."""
    yield pbs_session
    pbs_session.reset()


def _environment(python, prefix):
    """Return a tar file of what the environment holds: our sources, and what they need."""
    made = io.BytesIO()
    site = f"lib/{python}/site-packages"
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in (*OURS, *OTHERS):
            for file in distribution(name).files or ():
                path = Path(str(file.locate()))
                is_ours = name in OURS and ".dist-info" not in str(file)
                if path.is_file() and not is_ours and "__pycache__" not in path.parts:
                    tar.add(path, os.path.normpath(f"{site}/{file}"), recursive=False)
        for name in OURS:
            (source,) = (PACKAGES / name / "src").glob("ezpz_*")
            tar.add(source, f"{site}/{source.name}", filter=_without_bytecode)
            for script in distribution(name).entry_points.select(group="console_scripts"):
                module, _, function = script.value.partition(":")
                text = (
                    f"#!{prefix}/bin/python\nimport sys\nfrom {module} import {function}\n"
                    f"sys.exit({function}())\n"
                ).encode()
                entry = tarfile.TarInfo(f"bin/{script.name}")
                entry.size, entry.mode = len(text), 0o755
                tar.addfile(entry, io.BytesIO(text))
    return made.getvalue()


def _without_bytecode(entry):
    return None if "__pycache__" in entry.name else entry
