"""One launch, seen through by the run loop: the launcher, what ranks report, the end, hangs."""

import gc
import os
import shlex
import signal
import threading
import time

import pytest

from ezpz_launch import LaunchError
from ezpz_launch._run import loop as module
from ezpz_launch._run.launch import Launch, RankSettings
from ezpz_launch._run.loop import run
from ezpz_launch._run.processes import is_running
from ezpz_launch._run.signals import Inbox
from ezpz_launch._run.states import TRANSITIONS, RunState

HERE = os.uname().nodename
NO_PID = 1 << 30


def shorten(monkeypatch, state, seconds):
    """Let a state last for so many seconds, wherever it is entered from."""
    for rows in TRANSITIONS.values():
        for event, row in rows.items():
            if row.state is state:
                monkeypatch.setitem(rows, event, row._replace(seconds=seconds))


def report(what, rank, value, launch_id):
    words = f"{what[0]} {rank} {value}"
    return f"\x1e{launch_id.rpartition('-')[2]} {words}|{words}\x1f\n" * 2


@pytest.fixture
def ran(capfd):
    """Run a launcher that says of its ranks what the test wants; return outcome and output."""

    def run_it(
        script="", *, later=(), ranks=4, starts=None, reports=(), told=(), on_start=None, **more
    ):
        launch_id = f"run-test.{os.urandom(8).hex()}"
        starts = range(ranks) if starts is None else starts
        said = [("start", rank, NO_PID) for rank in starts] + list(reports)
        text = "".join(report(*one, launch_id) for one in said)
        for seconds, one in later:
            script += f"sleep {seconds}; printf %s {shlex.quote(report(*one, launch_id))} >&2; "
        control = RankSettings(launch_id, 5, **more.pop("control", {}))
        fields = {"hosts": ("localhost", "beta"), "ppn": 2, "on_this_host": False, "grace": 0.0}
        launch = Launch(
            argv=("sh", "-c", f'printf "%s" "$1" >&2; {script}', "sh", text), nproc=ranks,
            environment={"PATH": os.environ["PATH"], "A": "b c"}, settings=control,
            **{**fields, **more},
        )  # fmt: skip
        read, write = os.pipe()
        try:
            outcome = run(launch, Inbox(list(told), read), on_start)
        finally:
            os.close(read)
            os.close(write)
        out, err = capfd.readouterr()
        return outcome, out, err.replace("ezpz-launch: ", "")

    return run_it


# the loop


def test_ranks_that_do_not_start_are_named_once_and_the_launch_goes_on(ran, monkeypatch):
    monkeypatch.setattr(module, "UNSTARTED_SECONDS", 2)  # in which a busy host starts one
    ended, _, err = ran("sleep 3", starts=[0])  # long enough for a round with nothing due
    absent = f"after 2 s 3 of 4 ranks have not started: 1 on {HERE}, 2 on beta, 3 on beta\n"
    assert (ended.exit_status, err.count(absent)) == (1, 1)


# the launcher


def test_a_launcher_that_cannot_be_started_leaves_nothing_open():
    words = ("true", "x" * (1 << 18))
    launch = Launch(words, 1, ("a",), 1, True, dict(os.environ), RankSettings("ID.0", 5))
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(LaunchError) as caught:
        run(launch)
    assert str(caught.value) == "true cannot be started: Argument list too long"
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("deaf", [False, True])
def test_a_launcher_that_stays_is_ended_then_killed(ran, monkeypatch, deaf):
    shorten(monkeypatch, RunState.FINISHING, 0.2)
    script = f"trap 'echo heard{'' if deaf else '; exit 5'}' TERM; sleep 600 & echo $!; "
    ends = [("end", rank, 0) for rank in range(4)]
    outcome, out, err = ran(f"{script} while :; do wait; done", reports=ends)
    child, *rest = out.splitlines()
    assert (rest, outcome.exit_status) == (["heard"], 0)
    assert f"the launcher with {137 if deaf else 5}, which is not passed on" in err
    assert not is_running(int(child)), "all of its group is told"


def test_a_signal_for_ranks_that_no_agent_reaches_goes_through_the_launcher(ran):
    script = "trap 'echo heard; exit 9' TERM; while :; do sleep 0.05; done"
    outcome, out, err = ran(script, told=[signal.SIGTERM], grace=60.0, hosts=("beta.invalid",) * 2)
    assert (out, outcome.exit_status, outcome.end_signal) == ("heard\n", 143, signal.SIGTERM)
    assert "no agent on beta.invalid" in err
    assert "SIGTERM goes through the launcher, which may kill at once" in err


def test_a_run_leaves_no_file_open(ran):
    gc.disable()  # what is not closed is not closed by chance either
    try:
        ran("true", reports=ALL)
        before = sorted(os.listdir("/proc/self/fd"))
        ran("true", reports=ALL)
        assert sorted(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


# how it ended

ALL = [("end", rank, 0) for rank in range(4)]


def ends(**statuses):
    return [("end", int(rank[1:]), status) for rank, status in statuses.items()]


@pytest.mark.parametrize(("reports", "script", "told", "expected"), [
    (ALL, "", None, 0),
    (ALL, "exit 141", None, 0),  # what Hydra adds is not passed on
    (ends(r2=6, r0=1, r1=1, r3=1), "exit 7", None, 6),
    (ends(r0=0, r2=137, r1=143, r3=143), "exit 9", None, 137),
    (ends(r0=75, r1=75, r2=75, r3=75), "exit 75", None, 75),
    (ends(r0=143), "kill -15 $$", signal.SIGTERM, 143),
    (ends(r0=1), "exit 1", signal.SIGINT, 130),
    (ends(r0=75, r1=75), "exit 75", signal.SIGTERM, 75),
    (ends(r0=0, r1=1, r2=75), "exit 75", signal.SIGTERM, 143),
    # the first word of a rank counts, and a rank that there is not has none
    ([*ALL, ("end", 0, 4), ("start", 4, 1), ("end", 99999, 1)], "", None, 0),
])  # fmt: skip
def test_the_exit_status(ran, reports, script, told, expected):
    assert ran(script, reports=reports, told=[told] if told else [])[0].exit_status == expected


def test_who_failed_first_is_named_and_who_left_because_of_another_is_not(ran):
    outcome, _, err = ran("exit 9", reports=ends(r3=7, r1=9))
    assert outcome.failure == (3, "beta", 7)
    assert err == "rank 3 on beta exited with status 7, first of all ranks\n"
    outcome, *_ = ran("exit 9", reports=[("cause", 0, 2), ("cause", 0, 2), *ends(r0=1)])
    assert outcome.failure == (2, "beta", 1)
    # no rank of this launch is meant
    outcome, *_ = ran("exit 9", reports=[("cause", 1, 4), *ends(r1=1)])
    assert outcome.failure == (1, HERE, 1)


@pytest.mark.parametrize(
    ("script", "expected"),
    [("", 1), ("exit 5", 5), ("kill -9 $$", 137)],
)
def test_silent_ranks_are_no_success(ran, script, expected):
    outcome, _, err = ran(script, reports=ends(r0=0, r2=0))
    assert outcome.exit_status == expected
    assert err.endswith(f"ranks that did not report their end: 1 on {HERE}, 3 on beta\n")
    killed = "was killed by SIGKILL (exit status 137)"
    said = killed if expected == 137 else f"exited with status {expected if script else 0}; ranks"
    assert f"the launcher {said}" in err


def test_a_rank_whose_process_is_gone_without_a_report_is_lost(ran, monkeypatch):
    monkeypatch.setattr(module, "GONE_SECONDS", 0.5)
    outcome, _, err = ran("sleep 600", ranks=1, hosts=(HERE,), on_this_host=True)
    assert outcome.failure == (0, HERE, 137)
    assert err.startswith(f"rank 0 on {HERE}: lost (its process or its launcher died)\n")


def test_each_rank_that_is_gone_has_its_own_time_to_be_reported(ran, monkeypatch):
    monkeypatch.setattr(module, "GONE_SECONDS", 4.0)
    later = [(3, ("start", 1, NO_PID)), (0, ("end", 0, 0)), (3, ("end", 1, 0))]
    outcome, _, err = ran(ranks=2, starts=[0], later=later, hosts=(HERE,), on_this_host=True)
    assert (outcome.exit_status, err) == (0, "")


def test_an_end_that_waits_behind_output_is_no_loss(monkeypatch):
    """As after Ctrl-S: our standard error is not read, for longer than a report may take."""
    monkeypatch.setattr(module, "GONE_SECONDS", 1.0)
    launch_id = f"run-test.{os.urandom(8).hex()}"
    texts = [report(what, 0, number, launch_id) for what, number in (("start", NO_PID), ("end", 0))]
    words = ("sh", "-c", 'printf %s "$1" >&2; yes | head -c 300000 >&2; printf %s "$2" >&2', "sh")
    control = RankSettings(launch_id, 5)
    launch = Launch((*words, *texts), 1, (HERE,), 1, True, dict(os.environ), control)
    (read, write), own = os.pipe(), os.dup(2)
    os.dup2(write, 2)
    os.close(write)

    def take_all():
        with os.fdopen(read, "rb") as file:
            file.read()

    reader = threading.Timer(3, take_all)
    reader.start()
    try:
        assert run(launch).exit_status == 0
    finally:
        os.dup2(own, 2)
        os.close(own)
        reader.join()


def test_none_had_started_and_a_port_that_is_taken(ran, until):
    outcome, out, err = ran("sleep 600 >/dev/null 2>&1 & echo $!; exit 2", starts=())
    assert outcome.exit_status == 2
    until(lambda: not is_running(int(out)))  # what the launcher left in its group
    assert f"0 on {HERE}, 1 on {HERE}, 2 on beta, 3 on beta; none had started" in err
    outcome, *_ = ran("sleep 600", reports=[("taken", 0, 29500)])  # it ends at once
    assert (outcome.exit_status, outcome.port_taken) == (2, True)


# hangs


def test_many_ranks_that_hang_or_never_started_are_named(ran):
    outcome, _, err = ran("sleep 600", ranks=60, starts=range(5, 40), reports=ends(r5=0), ppn=60,
                          hosts=("localhost",), on_this_host=True, idle_timeout=0.5)  # fmt: skip
    never, running = err.splitlines()[:2]
    assert outcome.exit_status == 124
    assert never.startswith("no output for 0.5 s; ranks that never started: 0 on ")
    assert never.endswith(f", 50 on {HERE} and 9 more")
    assert running.startswith(f"no output for 0.5 s; ranks that had not ended: 6 on {HERE}, 7 on")
    assert running.endswith(f", 21 on {HERE} and 18 more; where they are:")


def test_nodes_that_do_not_answer_are_not_waited_for_for_ever(ran, monkeypatch):
    shorten(monkeypatch, RunState.DIAGNOSING, 0.5)
    outcome, _, err = ran("sleep 600", idle_timeout=0.5)
    assert outcome.exit_status == 124
    assert f"1 on {HERE}, 2 on beta, 3 on beta; where they are:" in err
    # who tells it to end meanwhile has the last word
    assert ran("sleep 600", idle_timeout=0.5, told=[signal.SIGTERM])[0].exit_status == 143
    # without a rank nothing hangs
    assert ran("sleep 3", reports=ALL, idle_timeout=2)[0].exit_status == 0


@pytest.mark.parametrize("writes", [True, False])
def test_what_is_written_to_files_is_output(background, tmp_path, writes):
    """Also to files older than the launch."""
    (tmp_path / "rank-0.out").touch()
    os.utime(tmp_path / "rank-0.out", (1, 1))
    script = "for i in $(seq 12); do echo $i; sleep 0.25; done" if writes else "sleep 600"
    words = ["-n", "2", "--idle-timeout", "2", "--log-dir", tmp_path, "sh", "-c"]
    launch = background(*words, f"[ $RANK = 1 ] && exit 0; {script}", stderr=-1)
    assert launch.wait() == (0 if writes else 124), launch.stderr.read()


def test_a_launch_that_was_stopped_between_two_looks_does_not_hang(ran):
    """It is held up, longer than it may be silent, where it does not wait for anything."""
    script = "sleep 2.5; for i in 1 2 3; do echo $i; sleep 0.2; done"
    outcome, *_ = ran(script, idle_timeout=1.5, on_start=lambda: time.sleep(2))
    assert not outcome.evidence.hangs
