"""A debugger on one rank: at its terminal, or at a local port where it has none."""

import os
import pty
import re
import shlex
import subprocess
import sys
import textwrap

import pytest

# One who types: waits for the command that breakpoint() writes, and runs it. What it writes
# to standard error goes to a string.
PERSON = """
import io, re, shlex, socket, subprocess, threading, time
from ezpz_dist import _debugger as room
errors = sys.stderr = io.StringIO()
answers = []

def command():
    while not (found := re.search(r"in a shell on \\S+: (.*)", errors.getvalue())):
        time.sleep(0.01)
    return found[1]

def attach(typed):
    done = subprocess.run(command(), input=typed, capture_output=True, text=True, shell=True)
    answers.append(done.stdout + done.stderr)

def person(work, *arguments):
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    return thread
"""


def script(text):
    return PERSON + textwrap.dedent(text)


def at_a_terminal(program, typed, env):
    """Run Python in a pty and type a line at each prompt; return its status and the screen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, str(program)], env)
    shown = b""
    answered = 0
    try:
        while data := os.read(terminal, 65536):
            shown += data
            if typed and shown.count(b"(Pdb) ") > answered:
                answered = shown.count(b"(Pdb) ")
                os.write(terminal, typed.pop(0).encode() + b"\n")
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(terminal)  # which ends it where pytest's own time is over
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, shown.decode().replace("\r\n", "\n")


def test_at_a_terminal_pdb_stops_at_the_call_in_an_except_block(clean_env, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent("""
        import bdb, os
        from ezpz_dist import breakpoint

        def work(x):
            y = x * 2
            try:
                1 / (y - 4)
            except ZeroDivisionError as error:
                breakpoint()
            z = y + 1
            return z

        print("result", work(2))
        try:
            breakpoint()
        except bdb.BdbQuit:
            print("quit")
        os.environ["PYTHONBREAKPOINT"] = "0"
        breakpoint()
        try:
            breakpoint(rank=1)
        except ValueError as error:
            print(error)
        """)
    )
    typed = ["p y, error", "n", "n", "p z", "c", "q"]
    status, shown = at_a_terminal(program, typed, {**clean_env, "TERM": "dumb"})
    assert status == 0, shown
    assert "-> breakpoint()\n(Pdb) p y, error\n(4, ZeroDivisionError('division by zero'))" in shown
    assert "p z\n5\n" in shown
    assert "result 5\n" in shown
    assert shown.endswith("quit\nbreakpoint(rank=1); expected a rank from 0 to 0\n")


@pytest.mark.slow
def test_under_ezpz_launch_one_command_attaches(clean_env, tmp_path):
    pytest.importorskip("ezpz_launch")
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent("""
        import ezpz_dist
        from ezpz_dist import breakpoint
        rank = ezpz_dist.setup_torch(timeout=120)
        loss = 10.5 + rank
        breakpoint(rank=1)
        total = ezpz_dist.all_reduce(loss)
        print("rank", rank, "total", total, flush=True)
        ezpz_dist.barrier()
        ezpz_dist.cleanup()
        """)
    )
    words = [sys.executable, "-m", "ezpz_launch", "-n", "2", "--launcher", "spawn"]
    env = {**clean_env, "EZPZ_STATE_DIR": str(tmp_path)}
    launch = subprocess.Popen(
        [*words, sys.executable, str(program)],
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    shown = ""
    while not (found := re.search(r"type in a shell on \S+: (.*)\n", shown)):
        line = launch.stdout.readline()
        assert line, shown
        shown += line
    *variables, python, _, _, host, _ = shlex.split(found[1])
    assert (len(variables), python, host) == (1, sys.executable, "127.0.0.1")
    # A step over the collective needs the others.
    typed = "p rank, loss\nn\nrelease\nn\np total\nc\n"
    attached = subprocess.run(
        found[1], shell=True, env=env, input=typed, capture_output=True, text=True, check=False
    )
    shown += launch.communicate()[0]
    assert launch.returncode == 0, shown
    assert "rank 1 of 2 stops at train.py:6 and waits for you" in shown
    pdb = attached.stdout
    assert "-> breakpoint(rank=1)\n(Pdb rank 1) (1, 11.5)\n" in pdb
    assert "-> total = ezpz_dist.all_reduce(loss)\n(Pdb rank 1) the other ranks go on" in pdb
    assert "(Pdb rank 1) 22.0\n" in pdb
    for rank in range(2):
        assert f"rank {rank} total 22.0\n" in shown


@pytest.mark.slow
def test_the_others_and_their_watchdogs_wait_while_a_person_comes_and_goes(ranks):
    text = script("""
        rank = setup_torch(timeout=120)
        room.EVERY = 0.3
        import logging
        log = io.StringIO()
        logging.basicConfig(stream=log, format="%(message)s")

        def sessions():
            host, port = command().split()[-2:]
            port = int(port)
            silent = socket.create_connection((host, port))
            silent.close()
            with socket.create_connection((host, port)) as stranger:
                stranger.sendall(b"no token\\np 1 + 1\\n")
                try:
                    answers.append(f"stranger {stranger.recv(100)}\\n")
                except ConnectionResetError:
                    answers.append("stranger b''\\n")
            attach("p 6 * 7\\n")  # and leaves
            time.sleep(1)  # longer than EVERY and the watchdog's time
            attach("p rank\\nc\\n")
            try:
                socket.create_connection((host, port)).close()
            except ConnectionRefusedError:
                answers.append("nothing listens\\n")

        def stop():
            with watch(step_timeout=0.8):
                breakpoint()

        if rank == 0:
            typist = person(sessions)
            stop()
            typist.join()
            print(errors.getvalue(), *answers, sep="")
        else:
            start = time.monotonic()
            stop()
            print("waited", time.monotonic() - start > 1)
            print(log.getvalue())
            try:
                breakpoint(rank=5)
            except ValueError as error:
                print(error)
        print("sum", all_reduce(rank + 1))
        cleanup()
        """)
    first, second = ranks(2, text)
    assert "ezpz: rank 0 of 2 stops at " in first
    assert "stranger b''\n" in first
    assert "(Pdb rank 0) 42\n" in first
    # Whoever comes back sees the prompt again.
    assert re.search(r"once more\n\(Pdb rank 0\) 0\n", first), first
    assert "nothing listens\n" in first
    assert "waited True" in second
    assert "the other ranks wait for " in second
    assert "in pdb, breakpoint(rank=0)" in second
    assert "breakpoint(rank=5); expected a rank from 0 to 1" in second
    assert all(out.endswith("sum 3\n") for out in (first, second))


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_those_who_wait_learn_that_the_debugged_rank_has_ended(ranks, who):
    text = script(f"""
        rank = setup_torch(timeout=120)
        room.EVERY = 0.3
        if rank == {who}:
            def kill():
                command()
                time.sleep(0.5)
                os._exit(9)
            person(kill)
        try:
            breakpoint(rank={who})
        except LostRankError as error:
            print(error.ranks, error, flush=True)
        os._exit(0)
        """)
    outcomes = ranks(2, text, check=False)
    assert outcomes[who][0] == 9
    status, out, err = outcomes[1 - who]
    assert status == 0, err
    assert out.startswith(f"({who},) breakpoint(rank={who})"), out
    assert f"rank {who} on " in out
    assert "has ended" in out


@pytest.mark.slow
def test_those_who_wait_for_a_rank_that_never_comes_time_out(ranks):
    text = script("""
        rank = setup_torch(timeout=60)
        # Less time only now: a busy machine may need more to set up.
        import dataclasses
        from ezpz_dist import _world
        world = dataclasses.replace(_world.find_world(), timeout=2)
        _world.enter(world)
        if rank == 0:
            def elsewhere():
                while not world.store.check(["told"]):
                    time.sleep(0.05)
            elsewhere()
        else:
            error = raises(HangError, "", breakpoint)
            print(error.ranks, error, flush=True)
            world.store.set("told", "")
        os._exit(0)
        """)
    _, out = ranks(2, text)
    assert out.startswith("(0,) breakpoint(rank=0) at ")
    assert "did not come within 2 s; expected every rank to call it at that line" in out
    assert " in elsewhere" in out


@pytest.mark.parametrize(
    ("words", "token", "status", "message"),
    [
        ([], "x", 2, "usage: EZPZ_BREAKPOINT_TOKEN="),
        (["127.0.0.1", "1"], None, 2, "usage: EZPZ_BREAKPOINT_TOKEN="),
        (["127.0.0.1", "1"], "x", 1, "127.0.0.1 1: [Errno 111] Connection refused; expected"),
    ],
)
def test_what_the_program_that_attaches_refuses(clean_env, words, token, status, message):
    env = dict(clean_env)
    if token is not None:
        env["EZPZ_BREAKPOINT_TOKEN"] = token
    command = [sys.executable, "-m", "ezpz_dist._attach", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith(message)) == (status, True), done
