"""Real processes with the names that launchers have."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ezpz_topo import FAMILIES, launching_ancestors

LINUX = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="the kernel shows no /proc")
SAY = "from ezpz_topo import launching_ancestors as a; print(*[x.family for x in a()])"


def below(words: list[str], *inner: str) -> list[str]:
    """Return what a Python says that is started by these processes, outermost first."""
    said = subprocess.run([*words, *inner], capture_output=True, text=True, check=True, timeout=60)
    # Above the test itself there may be real launchers: they are in every answer.
    mine = [ancestor.family for ancestor in launching_ancestors()]
    families = said.stdout.split()
    nearer = len(families) - len(mine)
    assert families[nearer:] == mine
    return families[:nearer]


@pytest.fixture
def process(tmp_path: Path):
    """Return the words that run a command below a process of that name."""
    shell = shutil.which("sh")
    assert shell is not None

    def named(name: str) -> list[str]:
        path = tmp_path / name
        shutil.copy(os.path.realpath(shell), path)
        # "$@" and not the last command: else the shell would become it.
        return [str(path), "-c", '"$@"; exit $?', name]

    return named


@LINUX
@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("hydra_pmi_proxy", "pmi"),
        ("prted", "openmpi"),
        ("prterun", "openmpi"),
        ("slurmstepd", "slurm"),
        ("flux-shell", "flux"),
        ("mpispawn", "mvapich2"),
    ],
)
def test_each_launchers_process_is_known_by_name(process, name, launcher):
    assert below(process(name), sys.executable, "-c", SAY) == [launcher]


@LINUX
def test_nearest_first_and_shells_between_do_not_count(process):
    words = [*process("slurmstepd"), *process("sh-of-user"), *process("hydra_pmi_proxy")]
    assert below(words, sys.executable, "-c", SAY) == ["pmi", "slurm"]


@LINUX
@pytest.mark.parametrize("how", ["script", "module", "path", "options"])
def test_torchruns_agent_is_a_python_known_by_what_it_runs(tmp_path, how):
    inner = "import subprocess, sys; subprocess.run(sys.argv[1:], check=True)"
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "run.py").write_text(inner)
    (tmp_path / "torchrun").write_text(inner)
    words = {
        "script": [sys.executable, str(tmp_path / "torchrun")],
        "module": [sys.executable, "-m", "torch.distributed.run"],
        "path": [sys.executable, str(package / "run.py")],
        "options": [sys.executable, "-u", "-W", "ignore", "-m", "torch.distributed.run"],
    }[how]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    # -E: what is below must not see the torch that is none.
    said = subprocess.run([*words, sys.executable, "-E", "-c", SAY], env=env,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert said.stdout.split()[0] == "torchrun"


def test_a_python_that_has_torchrun_among_its_arguments_is_no_agent(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import subprocess, sys; subprocess.run(sys.argv[2:], check=True)")
    words = [sys.executable, str(script), "torchrun"]
    assert below(words, sys.executable, "-c", SAY) == []


def test_a_name_with_brackets_and_blanks(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_bytes(b"7 (a) b) (c)) S 6 7 7 0")
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / "stat").write_bytes(b"6 (prted) S 1 6 6 0")
    (tmp_path / "6" / "comm").write_bytes(b"prted\n")
    (found,) = launching_ancestors(7, proc=str(tmp_path))
    assert (found.family, found.process) == ("openmpi", "prted (pid 6)")


def test_without_proc_nothing_is_known(tmp_path):
    assert list(launching_ancestors(7, proc=str(tmp_path))) == []


def test_no_two_families_claim_one_process():
    claimed = [name for each in FAMILIES for name in each.processes]
    assert len(set(claimed)) == len(claimed)
    assert "hydra_pmi_proxy" in claimed
