"""``ezpz test`` on real ranks, as a user outside of any job."""

import json
import subprocess
import sys

import pytest

TEST = "from ezpz._test.rank import run; sys.exit(run({words!r}))"


@pytest.fixture
def clean_env(clean_env, tmp_path):
    """The environment of that user, whose records and temporary files are ours."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return {
        **clean_env, "COLUMNS": "80", "EZPZ_STATE_DIR": str(tmp_path / "state"),
        "TMPDIR": str(folder),
    }  # fmt: skip


@pytest.fixture
def ezpz(clean_env, tmp_path):
    def run(*words, **options):
        return subprocess.run(
            [sys.executable, "-m", "ezpz", *words], env=clean_env, cwd=tmp_path,
            capture_output=True, text=True, check=False, **options,
        )  # fmt: skip

    return run


@pytest.fixture
def ranks(ranks, tmp_path):
    """Run a script on n real ranks, in a folder of their own; return (status, output, errors)."""
    (tmp_path / "cwd").mkdir()

    def run(n, script, **options):
        return ranks(n, script, check=False, cwd=tmp_path / "cwd", **options)

    return run


@pytest.fixture
def tested(ranks):
    """Run a test on n ranks, which all end with 0, and return what it found."""

    def run(n, *words, **kwargs):
        done = ranks(n, TEST.format(words=["--json", *words]), **kwargs)
        assert [status for status, _, _ in done] == [0] * n, done[0][2]
        assert all(not out for _, out, _ in done[1:]), "rank 0 alone speaks"
        return json.loads(done[0][1])

    return run
