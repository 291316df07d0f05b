"""A signal reaches some ranks in some step: all save at one step and exit with 75."""

import signal
import threading

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

ONE_RANK = {1: {3: "SIGUSR1"}}
ALL_RANKS = {rank: {4: "SIGTERM"} for rank in range(4)}
SOME_RANKS = {0: {2: "SIGTERM"}, 3: {3: "SIGUSR1", 5: "SIGTERM"}}


@pytest.mark.parametrize(
    ("n", "signals"),
    [(1, {0: {3: "SIGTERM"}}), (2, ONE_RANK), (4, SOME_RANKS), (4, ALL_RANKS)],
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
            if rank == 1 and step == 17:  # nothing holds it back, and it stays in this step
                open(os.environ["AHEAD"], "w").close()
                time.sleep(0.5)
            if rank != 1:
                time.sleep(0.005)
            snapshot.step(step)
    """
    done = ranks(
        3,
        BEGIN + script,
        check=False,
        env={"AHEAD": str(tmp_path / "ahead"), "ASKED": str(tmp_path / "asked")},
    )
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
    barrier()
    """
    done = ranks(2, BEGIN + script, check=False)
    assert [code for code, _, _ in done] == [0, 0], done
    said = [err.count("saves nothing: a rank is done with its steps") for _, _, err in done]
    assert said == [0, 1], "the second time, on the rank that was not done"


def test_a_save_that_fails_on_one_rank_fails_on_all(ranks):
    script = """
    def save(step):
        if rank == 1:
            raise OSError("disk full")
    try:
        with SnapshotOnSignal(save) as snapshot:
            send("SIGUSR1")
            for step in range(1000):
                time.sleep(0.002)
                all_reduce(1)
                snapshot.step(step)
    except (OSError, CheckpointError) as error:
        print(type(error).__name__, error)
    barrier()
    """
    done = ranks(2, BEGIN + script)
    assert done[1] == "OSError disk full\n"
    assert "CheckpointError the snapshot at step" in done[0]
    assert "failed on rank 1 on" in done[0]
    assert "OSError: disk full; expected every rank to save" in done[0]


def test_steps_of_two_names_are_told(ranks):
    script = """
    try:
        with SnapshotOnSignal(saved) as snapshot:
            send("SIGUSR1")
            for step in range(1000):
                time.sleep(0.002)
                snapshot.step(step + 1000 * rank)
                all_reduce(1)
    except (MismatchError, CheckpointError) as error:
        print(error)
    barrier()
    """
    done = ranks(2, BEGIN + script)
    assert all("where another rank calls step(" in out for out in done), done
    assert sum("the snapshot at step" in out for out in done) == 1


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


def test_an_interrupted_run_ends_as_the_uninterrupted(ranks, tmp_path):
    """In the middle of an epoch, with workers that fetch ahead, and dropout: bit for bit."""

    def run(name, stop):
        script = f"""
    where = "{tmp_path}/{name}"
    torch.manual_seed(7 + rank)
    model = wrap_model(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(torch.arange(96.0).view(24, 4), 3, shuffle=True, num_workers=1,
        multiprocessing_context="fork")  # as usual; the ranks of these tests would not
    parts = dict(model=model, optimizer=optimizer, data=loader)
    loaded = load_checkpoint(where, **parts)
    step = loaded.step + 1 if loaded else 0
    with SnapshotOnSignal(lambda step: save_checkpoint(where, step=step, **parts)) as snapshot:
        for epoch in range(loader.epoch, 2):
            for batch in loader:
                model(batch).square().mean().backward()
                optimizer.step(), optimizer.zero_grad()
                if step == {stop} and rank == 1:
                    send("SIGUSR1"), time.sleep(0.1)
                snapshot.step(step)
                step += 1
    print(step, [part.tolist() for part in model.parameters()])
    """
        return ranks(2, BEGIN + script, check=False)

    whole = run("whole", -1)
    assert [code for code, _, _ in whole] == [0, 0], whole
    stopped = run("stopped", 1)
    assert [code for code, _, _ in stopped] == [75, 75], stopped
    assert [out for _, out, _ in run("stopped", -1)] == [out for _, out, _ in whole]


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="signal 'SIGKILL'; expected the name of one that can be"):
        SnapshotOnSignal(print, signals=["SIGKILL"])
    with pytest.raises(ValueError, match="signal 'USR1'; expected the name"):
        SnapshotOnSignal(print, signals=["USR1"])
    with pytest.raises(ValueError, match="within 0; expected a positive number of seconds"):
        SnapshotOnSignal(print, within=0)
    caught = []

    def elsewhere():
        try:
            SnapshotOnSignal(print)
        except ValueError as error:
            caught.append(str(error))

    thread = threading.Thread(target=elsewhere, name="other")
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert "in thread 'other'; expected the main thread: Python handles signals there" in caught[0]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
