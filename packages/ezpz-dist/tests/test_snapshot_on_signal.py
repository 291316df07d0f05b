"""A signal reaches some ranks in some step: all save at one step and exit with 75."""

import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from ezpz_dist import SnapshotOnSignal

BEGIN = """
    import logging, signal, threading, time
    from ezpz_dist import SnapshotOnSignal
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    rank, n = setup_torch(timeout=120), int(os.environ.get("WORLD_SIZE", 1))
    saved = lambda step: print("saved", step, flush=True)
    def send(name):
        os.kill(os.getpid(), getattr(signal, name))
"""


@pytest.mark.parametrize(
    ("n", "signals"),
    [
        (1, {0: {3: "SIGTERM"}}),
        (2, {1: {3: "SIGUSR1"}}),
        (4, {0: {2: "SIGTERM"}, 3: {3: "SIGUSR1", 5: "SIGTERM"}}),
        (4, {rank: {4: "SIGTERM"} for rank in range(4)}),
    ],
    ids=["alone", "one", "some", "all"],
)
def test_all_ranks_save_at_one_step_whoever_got_the_signal(ranks, n, signals):
    script = f"""
    signals = {signals}
    with SnapshotOnSignal(saved) as snapshot:
        for step in range(1000):
            if name := signals.get(rank, {{}}).get(step):
                send(name)
            assert all_reduce(1) == n
            time.sleep(0.002)
            snapshot.step(step)
    """
    done = ranks(n, BEGIN + script, check=False)
    assert [code for code, _, _ in done] == [75] * n, done
    assert len({out for _, out, _ in done}) == 1
    assert int(done[0][1].split()[1]) < 500
    assert sum("got SIG" in err for _, _, err in done) <= len(signals)


def test_who_is_behind_catches_up_and_later_signals_change_nothing(ranks, tmp_path):
    script = """
    def save(step):
        send("SIGTERM"), time.sleep(0.05), send("SIGUSR1"), saved(step)
    if rank == 2:
        while not os.path.exists(os.environ["ASKED"]):  # it is not even there yet
            time.sleep(0.01)
        time.sleep(0.2)
    with SnapshotOnSignal(save) as snapshot:
        for step in range(10, 1000):
            if rank == 0 and step == 12:
                while not os.path.exists(os.environ["AHEAD"]):
                    time.sleep(0.01)
                send("SIGUSR1")
                open(os.environ["ASKED"], "w").close()
            if rank != 1 and step == 12:  # a thread gives the step that its rank is in
                while snapshot._voted is None:
                    time.sleep(0.01)
            if rank == 1 and step == 17:  # nothing holds it back; it stays here until all agree
                open(os.environ["AHEAD"], "w").close()
                while snapshot._stop_at > 1000:
                    time.sleep(0.01)
            if rank != 1:
                time.sleep(0.005)
            snapshot.step(step)
    """
    env = {"AHEAD": str(tmp_path / "ahead"), "ASKED": str(tmp_path / "asked")}
    done = ranks(3, BEGIN + script, check=False, env=env)
    assert [(code, out) for code, out, _ in done] == [(75, "saved 17\n")] * 3, done


def test_undisturbed_it_sends_nothing_and_puts_handlers_back(ranks):
    script = """
    handler = lambda number, frame: heard.append(number)
    heard = []
    signal.signal(signal.SIGUSR1, handler)
    before = signal.getsignal(signal.SIGTERM)
    with SnapshotOnSignal(saved) as snapshot:
        assert signal.getsignal(signal.SIGUSR1) is not handler
        start = time.process_time()
        for step in range(10_000):
            snapshot.step(step)
        assert time.process_time() - start < 0.5, "50 us a step, where it takes a fraction of one"
        if os.fork() == 0:
            send("SIGUSR1")  # ignored in a child
            send("SIGTERM")
            time.sleep(20)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert signal.getsignal(signal.SIGTERM) is before
    deadline = time.monotonic() + 120
    while "ezpz-snapshot" in {thread.name for thread in threading.enumerate()}:
        assert time.monotonic() < deadline, "its thread ends with it"
    send("SIGUSR1")
    assert heard == [signal.SIGUSR1]
    # A second one, with one rank done with its steps: the other goes on to its end.
    snapshot = SnapshotOnSignal(saved, signals=["SIGUSR2"])
    snapshot.step(0)
    if rank == 0:
        snapshot.close()
    barrier()
    if rank == 1:
        send("SIGUSR2")
        time.sleep(0.1)
        snapshot.step(1), snapshot.step(2)
        snapshot.close(), snapshot.close()
    send("SIGUSR2")  # a warning that comes too late ends no rank
    barrier()
    """
    done = ranks(2, BEGIN + script, check=False)
    assert [code for code, _, _ in done] == [0, 0], done
    said = [err.count("saves nothing: a rank is done with its steps") for _, _, err in done]
    assert said == [0, 1], "the second time, on the rank that was not done"


def test_what_fails_on_one_rank_fails_on_all(ranks):
    """A save; and steps of two names."""
    script = """
    def save(step):
        if rank == 1:
            raise OSError("disk full")
    for saves, apart in ((save, 0), (saved, 1000)):
        try:
            with SnapshotOnSignal(saves) as snapshot:
                send("SIGUSR1")
                for step in range(1000):
                    time.sleep(0.002)
                    snapshot.step(step + apart * rank)
                    all_reduce(1)
        except (OSError, MismatchError, CheckpointError) as error:
            print(type(error).__name__, error)
        barrier()
    """
    first, second = (out.splitlines() for out in ranks(2, BEGIN + script))
    assert second[0] == "OSError disk full"
    failed = (
        r"CheckpointError the snapshot at step \d+ failed on rank 1 on \S+: OSError: disk full; "
    )
    assert re.match(failed + "expected every rank to save", first[0])
    assert all("where another rank calls step(" in said[-1] for said in (first, second))
    assert sum("the snapshot at step" in said[-1] for said in (first, second)) == 1


def test_it_gives_up_after_a_while_and_says_where_it_stands(ranks):
    script = """
    def save(step):
        if rank == 1:
            time.sleep(30)
    with SnapshotOnSignal(save, within=1) as snapshot:
        send("SIGTERM")
        for step in range(1000):
            time.sleep(0.002)
            all_reduce(1)
            snapshot.step(step)
    """
    done = ranks(2, BEGIN + script, check=False, timeout=120)
    assert [code for code, _, _ in done] == [124, 124], done
    text = "".join(err for _, _, err in done)
    assert "has not saved 1 s after SIGTERM (within=1); it stands at <string>:" in text
    assert "giving up with exit status 124" in text


def test_what_it_does_not_take():
    def refuse(said, **given):
        with pytest.raises(ValueError, match=said):
            SnapshotOnSignal(print, **given)

    refuse("signal 'SIGKILL'; expected the name of one that can be", signals=["SIGKILL"])
    refuse("signal 'USR1'; expected the name", signals=["USR1"])
    refuse("within 0; expected a positive number of seconds", within=0)
    said = "in thread 'other_0'; expected the main thread: Python handles signals there"
    with ThreadPoolExecutor(thread_name_prefix="other") as pool:
        pool.submit(refuse, said).result()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
