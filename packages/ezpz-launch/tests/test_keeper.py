import json
import os
import re
import subprocess
import sys
import time

from ezpz_launch._record import new_id


def history(env):
    words = [sys.executable, "-m", "ezpz_launch", "history", "--json"]
    done = subprocess.run(words, env=env, capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)


def test_ids_sort_by_time_and_are_unique():
    ids = [new_id(when) for when in (0, 0.5, 0.999999, 1, 1e9, 1e9 + 1e-3, time.time())]
    assert ids == sorted(ids)
    assert len({new_id(1) for _ in range(100)}) == 100
    assert re.fullmatch(r"\d{8}T\d{12}Z-\d+-[0-9a-f]{6}", ids[0])
    assert ids[0].startswith("19700101T000000000000Z-")


def test_a_launch_that_was_killed_never_ended(background, clean_env, until, tmp_path):
    launch = background("-n", "1", "sh", "-c", f"touch {tmp_path}/started; sleep 600")
    until((tmp_path / "started").exists)
    (record,) = until(lambda: history(clean_env))
    assert (record["state"], record["exit_status"]) == ("running", None)
    launch.kill()
    launch.wait(120)
    (record,) = history(clean_env)
    assert (record["state"], record["end"]) == ("never ended", None)


def test_how_it_ended(launch, clean_env):
    done = launch("--launcher", "spawn", "-n", "2", "sh", "-c", "[ $RANK = 0 ] || kill -9 $$")
    assert done.returncode == 137
    (record,) = history(clean_env)
    assert (record["state"], record["exit_status"], record["nproc"]) == ("ended", 137, 2)
    assert record["first_failure"] == {
        "rank": 1,
        "host": os.uname().nodename,
        "status": 137,
        "how": "was killed by SIGKILL (exit status 137)",
    }


def test_a_folder_that_cannot_be_written_is_a_warning(launch, tmp_path):
    (tmp_path / "file").touch()
    env = {"EZPZ_STATE_DIR": str(tmp_path / "file")}
    done = launch("--launcher", "spawn", "-n", "1", "--retries", "1", "echo", "hi", env=env)
    assert (done.returncode, done.stdout) == (0, "hi\n")
    assert done.stderr.count("no job record") == 1


def test_without_a_home_there_is_no_progress_file(launch):
    env = {"EZPZ_STATE_DIR": "", "XDG_STATE_HOME": "", "HOME": "not/absolute"}
    script = 'echo "[${EZPZ_PROGRESS_FILE-unset}]"'
    done = launch(
        *("--launcher", "spawn", "-n", "1", "--retries", "1", "sh", "-c", script), env=env
    )
    assert (done.returncode, done.stdout) == (0, "[unset]\n")


def test_the_progress_file_is_gone_afterwards(launch, clean_env):
    script = 'echo 3 >"$EZPZ_PROGRESS_FILE"; echo "$EZPZ_PROGRESS_FILE"; exit 75'
    done = launch("--launcher", "spawn", "-n", "1", "--retries", "1", "sh", "-c", script)
    assert done.returncode == 75
    path = done.stdout.strip()
    assert os.path.dirname(path) == os.path.join(clean_env["EZPZ_STATE_DIR"], "launches")
    assert not os.path.exists(path)
