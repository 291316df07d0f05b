"""The sandbox for a session, and the programs that the tests start in it."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import lacking, load

SAY = Path(__file__).resolve().parents[1] / "worlds" / "say_topology.py"

# Tests import it by its full name, and find it loaded.
load("slurm.topology")


@pytest.fixture(scope="session")
def sandbox():
    """The module ``sandbox.py``."""
    return load("slurm.sandbox")


@pytest.fixture(autouse=True)
def free_nodes(slurm):
    """Leave all nodes free: the next test may need each of them, or all."""
    yield
    slurm.make_free()


@pytest.fixture
def said_in(tmp_path):
    directory = tmp_path / "said"
    directory.mkdir()
    return directory


@pytest.fixture
def words(said_in):
    return [sys.executable, str(SAY), str(said_in)]


@pytest.fixture
def say(slurm, sandbox, words, said_in):
    """Start say_topology by the words given, and return what each process said."""

    def run(*launcher, then=(), env=None):
        # Whatever devices this host has, they are not the sandbox's.
        slurm.run([*launcher, *words, *then], env={"TORCH_DEVICE": "cpu", **(env or {})})
        return sandbox.reports(said_in)

    return run


@pytest.fixture
def batch(slurm, sandbox, words, said_in, tmp_path):
    """Run a batch script that finds say_topology as ``say``, and return what each said."""
    program = tmp_path / "bin" / "say"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)

    def run(body, *options, env=None):
        script = f'PATH={shlex.quote(str(program.parent))}:"$PATH"\n{body}'
        slurm.batch(script, *options, env={"TORCH_DEVICE": "cpu", **(env or {})})
        return sandbox.reports(said_in)

    return run


@pytest.fixture
def renamed():
    """Return words that go on where the host's name is a node's, as it is on a real machine."""
    # A namespace is this process's own: nobody else sees the name.
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        lacking("unshare --uts fails: a process may have no host name of its own here")
    script = 'hostname "$1" && shift && exec "$@"'
    return lambda node: ("unshare", "--uts", "sh", "-c", script, "sh", node)


@pytest.fixture
def site(slurm, tmp_path):
    """Put a site's own command before Slurm's on PATH; return the variables for it."""

    def make(name, *lines):
        real = shutil.which(name, path=slurm.environment["PATH"])
        path = tmp_path / "site" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(["#!/bin/sh", f'real() {{ {real} "$@"; }}', *lines, ""]))
        path.chmod(0o755)
        return {"PATH": f"{path.parent}:{slurm.environment['PATH']}"}

    return make


@pytest.fixture
def clusters(site, tmp_path):
    """Slurm's commands as those of a login node of another cluster, from which ours is asked by
    SLURM_CLUSTERS or --clusters: real ones would need slurmdbd. The log has what each was given.
    """
    # Inside a job of ours it is the local one.
    lines = [
        "for word; do shift; case $word in --clusters=*) SLURM_CLUSTERS=${word#*=} ;;",
        '*) set -- "$@" "$word" ;; esac; done',
        f'echo "${{0##*/}} ${{SLURM_CLUSTERS-none}} $*" >>{tmp_path}/log',
        "on=${SLURM_CLUSTERS-${SLURM_CLUSTER_NAME-other}}",
        'case $on in sandbox) ;; other) echo "slurm_load_jobs error: Invalid job id specified" >&2',
        "exit 1 ;; *) echo \"'$on' can't be reached now\" >&2; exit 1 ;; esac",
        "named=${SLURM_CLUSTERS:+;sandbox}",
        "unset SLURM_CLUSTERS SBATCH_CLUSTERS",
    ]
    for name in ("squeue", "sacct", "scontrol", "scancel"):
        site(name, *lines, 'real "$@"')
    env = site("sbatch", *lines, 'id=$(real "$@") && echo "$id$named"')
    (tmp_path / "setup.sh").write_text(f"PATH={env['PATH']}\n")
    return env


@pytest.fixture
def talkative(site):
    """Slurm's commands with lines beside their answers: a cluster's header, and a site's own."""
    balance = 'echo "Remaining balance: 497,218 hours"'
    lines = ['echo "CLUSTER: sandbox"', balance, 'real "$@"', "status=$?", balance, "exit $status"]
    for name in ("squeue", "sacct", "scontrol"):
        env = site(name, *lines)
    return env
