"""What runs a rank's command and passes its output on: around real commands."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ezpz_launch._plan.shim import PROGRAMS
from ezpz_launch._run.launch import RankSettings

# It is a program, never imported here.
RANK_MAIN = os.path.join(PROGRAMS, "rank_main.py")
HEAD = b"[3@nid01] "
REPORT = re.compile(rb"\x1etest.0 [^\x1f]*\x1f\n")

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells or does this")


def environment(**control):
    """What the shim exports for a rank, and what ezpz-launch hands to it."""
    given = RankSettings("main-test.0", hold_seconds=0, **control)
    rank = {"RANK": "3", "LOCAL_RANK": "3", "NODE_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    place = {"EZPZ_LAUNCHER": "slurm", "SLURMD_NODENAME": "nid01"}
    return {**rank, **place, "EZPZ_CONTROL": given.to_text()}


def words_of(*command):
    return [sys.executable, "-I", "-S", RANK_MAIN, *command]


def pump(*command, control=None, env=None, **kwargs):
    """Run the command as rank 3, with a prefix unless told otherwise; return how it ended."""
    variables = environment(**(control or {"prefix": True}))
    done = subprocess.run(
        words_of(*command), env={**(os.environ if env is None else env), **variables},
        capture_output=True, check=False, **kwargs,
    )  # fmt: skip
    done.stderr = REPORT.sub(b"", done.stderr)
    return done


@pytest.fixture
def running(process):
    """Start the command as rank 3 in a process group of its own, which is killed at the end."""

    def start(*command, control=None, **kwargs):
        variables = environment(**(control or {"prefix": True}))
        env = {**os.environ, **variables}
        return process(*words_of(*command), stdout=-1, env=env, **kwargs)

    return start


def python(code, *words):
    return (sys.executable, "-c", code, *words)


def text_until(stream, end):
    """What arrives up to this ending; a failure when it has not within 20 s."""
    seen = b""
    while not seen.endswith(end):
        assert select.select([stream], [], [], 20)[0], seen
        data = os.read(stream.fileno(), 1)
        assert data, seen
        seen += data
    return seen


# lines


def test_each_line_of_both_streams_has_the_prefix():
    done = pump("sh", "-c", "echo a; echo b >&2; echo; echo c")
    assert done.stdout == HEAD + b"a\n" + HEAD + b"\n" + HEAD + b"c\n"
    assert done.stderr == HEAD + b"b\n"


@pytest.mark.parametrize(("written", "shown"), [
    (b"a\r\nb\r\n", [b"a\r\n", b"b\r\n"]),
    (b"\xff\xfe\0\x80\n", [b"\xff\xfe\0\x80\n"]),
    (b"no end", [b"no end\n"]),
    (b"", []),
    (b"a\x0bb\x0cc\x1cd\x85e\xe2\x80\xa8f\n", [b"a\x0bb\x0cc\x1cd\x85e\xe2\x80\xa8f\n"]),
])  # fmt: skip
def test_what_a_line_is(written, shown):
    code = f"import os; os.write(1, {written!r})"
    assert pump(*python(code)).stdout == b"".join(HEAD + line for line in shown)


def test_a_progress_bar_gets_its_prefix_back():
    done = pump("printf", r"\r 10%%\r 20%%\r100%%\nend\n")
    assert done.stdout == b"\r" + b"\r".join(
        [HEAD + b" 10%", HEAD + b" 20%", HEAD + b"100%\n" + HEAD + b"end\n"]
    )


def test_a_progress_bar_that_takes_its_time(running):
    code = (
        "import os, sys\n"
        "for text in (b'\\r 10%', b'\\r 20%', b' of 9', b'\\r\\n', b'50%\\r', b'\\n', b'end\\n'):\n"
        "    os.write(1, text)\n"
        "    sys.stdin.readline()"
    )
    pump = running(*python(code), stdin=-1)
    for shown in (
        *(b"\r" + HEAD + b" 10%", b"\r" + HEAD + b" 20%", b" of 9", b"\r\n"),
        *(HEAD + b"50%\r", b"\n", HEAD + b"end\n"),
    ):
        assert text_until(pump.stdout, shown) == shown
        pump.stdin.write(b"\n")
        pump.stdin.flush()
    assert pump.wait() == 0


def test_a_prompt_is_shown_and_can_be_answered(running):
    code = "import sys; sys.stdout.write('name? '); sys.stdout.flush(); print(input())"
    pump = running(*python(code), stdin=-1)
    assert text_until(pump.stdout, b"? ") == HEAD + b"name? "
    pump.stdin.write(b"Ann\n")
    pump.stdin.close()
    assert text_until(pump.stdout, b"Ann\n") == b"Ann\n"
    # and a line that never rests
    code = "import os, time\nwhile True: os.write(1, b'.'); time.sleep(0.05)"
    assert text_until(running(*python(code)).stdout, b".").startswith(HEAD)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc tells the peak")
def test_a_line_of_64_megabytes_costs_no_memory(running):
    pump = running("head", "-c", str(64 << 20), "/dev/zero")
    seen, peak = len(text_until(pump.stdout, HEAD)), ""
    while data := os.read(pump.stdout.fileno(), 1 << 20):
        seen += len(data)
        if seen > 60 << 20 and not peak:
            # Not getrusage's, which counts what the parent of a fork had.
            status = Path(f"/proc/{pump.pid}/status").read_text()
            peak = status.partition("VmHWM:")[2].split()[0]
    assert seen == len(HEAD) + (64 << 20) + 1
    assert int(peak) < 48 << 10


# files


def test_files_hold_the_exact_bytes(tmp_path):
    code = (
        "import os, sys\n"
        "data = os.urandom(10 << 20)\n"
        "sys.stdout.buffer.write(data); open(sys.argv[1], 'wb').write(data)\n"
        "os.write(2, b'\\xff no end')"
    )
    folder = tmp_path / "logs"
    done = pump(
        *python(code, str(tmp_path / "sent")), control={"log_dir": str(folder), "tee": True}
    )
    sent = (tmp_path / "sent").read_bytes()
    assert len(sent) == 10 << 20
    assert done.stdout == sent
    assert (folder / "rank-3.out").read_bytes() == sent
    assert done.stderr == (folder / "rank-3.err").read_bytes() == b"\xff no end"


@ON_LINUX
def test_a_full_disk_is_said_once_and_harms_nobody(tmp_path):
    (tmp_path / "rank-3.out").symlink_to("/dev/full")
    code = "import os, time\nfor n in range(5): os.write(1, b'%d\\n' % n); time.sleep(0.02)"
    done = pump(*python(code), control={"log_dir": str(tmp_path), "tee": True})
    assert (done.returncode, done.stdout) == (0, b"0\n1\n2\n3\n4\n")
    assert done.stderr.count(b"rank-3.out: got No space left on device on writing") == 1


def test_a_terminal_that_is_gone_does_not_stop_the_command(running, tmp_path):
    code = "import sys; sys.stdout.buffer.write(b'line\\n' * 200000); sys.exit(5)"
    pump = running(*python(code), control={"log_dir": str(tmp_path), "prefix": True, "tee": True})
    pump.stdout.close()
    assert pump.wait() == 5
    assert (tmp_path / "rank-3.out").read_bytes() == b"line\n" * 200000


# how it ends


@pytest.mark.parametrize(("script", "status"), [
    ("exit 0", 0),
    ("exit 75", 75),
    ("kill -9 $$; echo alive", 128 + 9),  # a signal is 128 more
    ("kill -13 $$; echo alive", 128 + 13),
    ("exec >&- 2>&-; sleep 0.3; exit 6", 6),
])  # fmt: skip
def test_the_commands_own_exit_status(script, status):
    assert pump("sh", "-c", script).returncode == status


@pytest.mark.parametrize("leftover", ["sleep 600", "yes"])
def test_a_child_that_keeps_the_pipe_open_is_not_waited_for(running, leftover):
    pump = running("sh", "-c", f"({leftover}) & echo said; exit 4")
    assert HEAD + b"said\n" in pump.stdout.read()
    assert pump.wait() == 4


def test_output_written_last_is_not_lost_to_a_slow_reader(running):
    code = "import os; os.write(1, b'line\\n' * 12000)"  # what a pipe holds
    pump = running(*python(code), control={"whole_lines": True})
    time.sleep(1.5)  # longer than what is waited for after the command's end
    assert pump.stdout.read() == b"line\n" * 12000
    assert pump.wait() == 0


# signals

NUMBERS = [signal.Signals[f"SIG{name}"] for name in ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2"]]
NOTE = """
import os, signal, sys, time
for number in map(int, sys.argv[1:]):
    signal.signal(number, lambda number, _: os.write(1, b"got %d\\n" % number))
os.write(1, b"ready\\n")
sys.stdin.readline()
sys.exit(9)
"""


def test_a_signal_to_the_group_is_the_commands(running):
    pump = running(*python(NOTE, *(str(int(number)) for number in NUMBERS)), stdin=-1)
    text_until(pump.stdout, b"ready\n")
    for number in NUMBERS:
        os.killpg(pump.pid, number)
        assert text_until(pump.stdout, b"\n") == HEAD + b"got %d\n" % number
    pump.stdin.close()
    assert pump.wait() == 9


SHOW = """
import signal
numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
print([n.name for n in numbers if signal.getsignal(n) is signal.SIG_IGN])
print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
"""


@pytest.mark.parametrize("ignored", [[], ["SIGINT", "SIGUSR1", "SIGCHLD"]])
def test_what_was_ignored_stays_ignored_and_nothing_else(ignored):
    def ignore():
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGCHLD"):
            action = signal.SIG_IGN if name in ignored else signal.SIG_DFL  # not as under nohup
            signal.signal(signal.Signals[name], action)

    done = pump(*python(SHOW), control={"whole_lines": True}, preexec_fn=ignore)
    assert done.stdout.decode() == f"{ignored}\n[]\n"


# the command


def test_words_and_standard_input_are_untouched():
    assert pump("cat", control={"whole_lines": True}, input=b"\0words\n").stdout == b"\0words\n"
    words = [b"a b", b"", b"$(exit 3)", b"it's", b'"', b"new\nline", b"--", b"*", b"\xff\xfe"]
    assert (
        pump("printf", r"%s\0", *words, control={"whole_lines": True}).stdout.split(b"\0")[:-1]
        == words
    )


@ON_LINUX
@pytest.mark.parametrize("more", [{}, {"LC_CTYPE": "C.UTF-8", "PYTHONPATH": "/x"}])
def test_the_environment_is_untouched(more):
    # Python itself sets LC_CTYPE where no locale is
    env = {"PATH": os.environ["PATH"], **more}
    out = pump("env", "-0", control={"whole_lines": True}, env=env).stdout.decode()
    seen = dict(pair.split("=", 1) for pair in out.split("\0")[:-1])
    ours = {"TORCHELASTIC_RESTART_COUNT", *environment()}
    left = {name: value for name, value in seen.items() if name not in ours}
    assert {name: left[name] for name in left if not name.startswith("EZPZ_")} == env
    assert "EZPZ_CONTROL" not in seen


@pytest.mark.parametrize(("name", "status", "message"), [
    ("no-such-program", 127, "'no-such-program': not found on PATH"),
    ("./plain", 126, "'./plain': Permission denied"),
])  # fmt: skip
def test_a_command_that_cannot_be_run(tmp_path, name, status, message):
    (tmp_path / "plain").write_text("text")
    done = pump(name, cwd=tmp_path, control={"whole_lines": True})
    assert (done.returncode, done.stdout) == (status, b"")
    assert done.stderr.decode().startswith(f"ezpz-launch: rank 3 on nid01: {message}")
    assert len(done.stderr.splitlines()) == 1


def test_it_imports_next_to_nothing():
    code = (
        "import os, sys; sys.path.append(os.path.dirname(sys.argv[1])); import rank_main\n"
        "heavy = {'signal', 'enum', 're', 'json', 'typing', 'collections', 'subprocess'}\n"
        "print(heavy & set(sys.modules))"
    )
    words = [sys.executable, "-I", "-S", "-c", code, RANK_MAIN]
    assert subprocess.run(words, capture_output=True, check=True).stdout == b"set()\n"
