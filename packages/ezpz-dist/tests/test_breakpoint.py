"""A debugger on one rank: at a real terminal, under ezpz-launch, through a socket."""

import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest

from ezpz_dist import _debugger

# One who types: waits for the command that breakpoint() writes, and runs it. What it writes
# to standard error goes to a string; the rank has no terminal, wherever the tests are run.
PERSON = """
import io, re, shlex, shutil, signal, subprocess, threading, time
from ezpz_dist import _debugger as room
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
if os.getsid(0) != os.getpid():
    os.setsid()
said = sys.stderr = io.StringIO()
answers = []

def command():
    while not (found := re.search(r"in a shell on \\S+: (.*)", said.getvalue())):
        time.sleep(0.01)
    return shlex.split(found[1])

def attach(typed):
    done = subprocess.run(command(), input=typed, capture_output=True, text=True)
    answers.append(done.stdout + done.stderr)

def person(work, *arguments):
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    return thread
"""


def script(text):
    return PERSON + textwrap.dedent(text)


def test_one_process_is_plain_pdb_at_the_call_and_in_an_except_block(ranks):
    text = script("""
        read, write = os.pipe()
        os.write(write, b"p y\\np error\\npm\\np sorted(locals())\\nq\\nn\\nn\\np z\\nc\\nq\\n")
        os.dup2(read, 0)
        sys.stdin = open(0)

        def half(x):
            return 1 / (x - 4)

        def work(x):
            y = x * 2
            try:
                half(y)
            except ZeroDivisionError as error:
                breakpoint()
            z = y + 1
            return z

        print("result", work(2))
        import bdb
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
    (out,) = ranks(1, text)
    assert "in handling ZeroDivisionError('division by zero'); pm shows where" in out
    assert "(Pdb) 4\n(Pdb) ZeroDivisionError('division by zero')\n" in out
    assert "(pm) ['x']\n" in out
    assert "(Pdb) 5\n(Pdb) result 5\n" in out
    assert out.endswith("quit\nbreakpoint(rank=1); expected a rank from 0 to 0\n")


def test_the_terminal_that_is_found(ranks):
    text = script("""
        import pty
        from ezpz_dist._debugger import find_terminal, has_input

        def below_a_terminal(session):
            pid, terminal = pty.fork()
            if pid == 0:
                try:
                    text = session()
                except BaseException as error:
                    text = repr(error)
                os.write(2, text.encode() + b"\\n")
                os._exit(0)
            text = b""
            try:
                while data := os.read(terminal, 1000):
                    text += data
            except OSError:
                pass
            os.waitpid(pid, 0)
            os.close(terminal)
            return text.decode().split("\\r\\n")[0]

        def redirected():
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            return f"{find_terminal('none')} {find_terminal('pmi')[1]}"

        def child(work):
            read, write = os.pipe()
            if os.fork() == 0:
                try:
                    work()
                    text = str(find_terminal("ezpz"))
                except BaseException as error:
                    text = repr(error)
                os.write(write, text.encode())
                os._exit(0)
            os.wait()
            return os.read(read, 1000).decode()

        print(below_a_terminal(lambda: str(find_terminal("none"))))
        print(below_a_terminal(redirected))
        print(below_a_terminal(lambda: child(lambda: os.setpgid(0, 0))))
        # As ezpz-launch starts ranks, below an agent; then one whose launcher is in the background.
        def rank():
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        def agent():
            rank()
            if os.fork():
                os.wait()
                os._exit(0)
            rank()
        print(below_a_terminal(lambda: child(agent) + " of " + os.ttyname(1)))
        def launcher():
            os.setpgid(0, 0)
            print(child(rank), file=os.fdopen(os.dup(2), "w"))
        print(below_a_terminal(lambda: child(launcher)))
        """)
    (out,) = ranks(1, text)
    lines = out.splitlines()
    assert lines[0] == "('stdin', '')"
    assert lines[1] == ("('/dev/tty', '') the terminal's input is read by the launcher (pmi)")
    assert lines[2] == "('', 'this process runs in the background of its terminal')"
    found, _, is_at = lines[3].partition(" of ")
    assert found == f"('{is_at}', '')"
    assert "above it runs in the background of its terminal" in lines[4]


def at_a_terminal(words, typed, env):
    """Run a command in a pty and type a line at each prompt; return its status and the screen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(words[0], words, env)
    shown, answered = b"", 0
    try:
        while data := os.read(terminal, 65536):
            shown += data
            # Other ranks' lines may come behind a prompt.
            if typed and shown.count(b"\n(Pdb rank ") > answered:
                answered += 1
                os.write(terminal, typed.pop(0).encode() + b"\n")
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(terminal)  # which ends it where pytest's own time is over
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, shown.decode().replace("\r\n", "\n")


def test_under_ezpz_launch_pdb_is_on_the_launchers_terminal(clean_env, tmp_path):
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
    words = [sys.executable, "-m", "ezpz_launch", "-n", "2", "--launcher", "spawn", "--prefix"]
    env = {**clean_env, "EZPZ_STATE_DIR": str(tmp_path)}
    # A step over the collective needs the others.
    typed = ["p rank, loss", "n", "release", "n", "p total", "c"]
    status, shown = at_a_terminal([*words, sys.executable, str(program)], typed, env)
    assert status == 0, shown
    # The other rank's lines may come anywhere.
    pdb = re.sub(r"\[\d@[^\n]*\n", "", shown.replace("\x1b[K", ""))
    assert "-> breakpoint(rank=1)\n(Pdb rank 1) p rank, loss\n(1, 11.5)\n" in pdb
    assert (
        "-> total = ezpz_dist.all_reduce(loss)\n(Pdb rank 1) release\nthe other ranks go on" in pdb
    )
    assert "p total\n22.0\n" in pdb
    for rank in range(2):
        assert f"rank {rank} total 22.0\n" in shown


def test_without_a_terminal_through_a_socket(ranks):
    text = script("""
        rank = setup_torch(timeout=120)
        room.EVERY = 0.3
        import logging
        log = io.StringIO()
        logging.basicConfig(stream=log, format="%(message)s")

        def sessions():
            attach("p 6 * 7\\n")  # and leaves
            time.sleep(1)  # longer than EVERY
            # Ctrl-C reaches what the rank computes.
            link = subprocess.Popen(
                command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                start_new_session=True,
            )
            link.stdin.write("p spin()\\n")
            link.stdin.flush()
            while not spinning:
                time.sleep(0.01)
            time.sleep(0.1)
            link.send_signal(signal.SIGINT)
            answers.append(link.communicate("p rank\\nc\\n")[0])

        spinning = []
        def spin():
            spinning.append(1)
            while True:
                time.sleep(0.01)

        def stop():
            with watch(step_timeout=0.8):
                breakpoint()

        if rank == 0:
            typist = person(sessions)
            stop()
            typist.join()
            print(said.getvalue(), *answers, sep="")
            folder = os.path.dirname(command()[-1])
            print("folder", os.path.exists(folder))
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
    assert "waits for you; no process above this one has a terminal. Type in a shell on" in first
    assert "(Pdb rank 0) 42\n" in first
    assert "left; the rank waits: the same command connects again" in first
    assert "KeyboardInterrupt" in first
    assert "(Pdb rank 0) 0\n" in first
    assert "the debugger has ended\n" in first
    assert "folder False\n" in first
    assert "waited True" in second
    assert "the other ranks wait for " in second
    assert "pdb, breakpoint(rank=0), debugged at a socket; type in a shell on" in second
    assert "breakpoint(rank=5); expected a rank from 0 to 1" in second
    assert all(out.endswith("sum 3\n") for out in (first, second))


@pytest.mark.parametrize("who", [0, 1])
def test_those_who_wait_learn_that_the_debugged_rank_has_ended(ranks, who):
    text = script(f"""
        rank = setup_torch(timeout=120)
        room.EVERY = 0.3
        if rank == {who}:
            def kill():
                folder = os.path.dirname(command()[-1])
                time.sleep(0.5)
                shutil.rmtree(folder)
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


def test_the_program_that_connects_says_how_it_is_used():
    program = os.path.dirname(_debugger.__file__)
    for words, status, said in (([], 2, "usage: python"), (["/no"], 1, "/no: No such file")):
        command = [sys.executable, program, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.startswith(said)) == (status, True), done
