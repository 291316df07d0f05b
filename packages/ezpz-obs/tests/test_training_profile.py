import json

import pytest

torch = pytest.importorskip("torch")

from ezpz_obs import profile  # noqa: E402


def loop(directory, count, **options):
    layer = torch.nn.Linear(16, 16)
    with profile(directory, **options) as profiler:
        for _ in range(count):
            layer(torch.ones(4, 16)).sum().backward()
            profiler.step()
    return profiler


def names_in(path):
    events = json.loads(path.read_text())["traceEvents"]
    return [event["name"] for event in events if "name" in event]


def test_a_trace_of_the_chosen_steps(tmp_path):
    profiler = loop(tmp_path / "traces", 6, steps=(2, 4))
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "trace-rank00000-steps2-3.json",
        "trace-rank00000-steps2-3.txt",
    ]
    names = names_in(profiler.trace)
    assert profiler.trace == tmp_path / "traces" / "trace-rank00000-steps2-3.json"
    assert names.count("aten::addmm") == 2
    assert {name for name in names if name.startswith("ProfilerStep")} == {
        "ProfilerStep#2", "ProfilerStep#3",
    }  # fmt: skip
    assert "aten::addmm" in profiler.table
    assert (tmp_path / "traces" / "trace-rank00000-steps2-3.txt").read_text() == profiler.table


def test_from_the_first_step_and_a_run_that_goes_on(tmp_path):
    assert names_in(loop(tmp_path, 3, steps=(0, 1)).trace).count("aten::addmm") == 1
    profiler = loop(tmp_path, 4, steps=(1001, 1003), first=1000)
    assert profiler.trace.name == "trace-rank00000-steps1001-1002.json"
    assert "ProfilerStep#1001" in names_in(profiler.trace)
    at_once = names_in(loop(tmp_path, 2, steps=(7, 8), first=7).trace)
    assert at_once.count("aten::addmm") == 1
    assert "ProfilerStep#7" in at_once


def test_options_reach_torch(tmp_path):
    trace = loop(tmp_path, 3, steps=(1, 2), shapes=True, memory=True).trace
    events = json.loads(trace.read_text())["traceEvents"]
    (product,) = [event for event in events if event.get("name") == "aten::addmm"]
    assert [16, 16] in product["args"]["Input Dims"]
    assert any(event.get("name") == "[memory]" for event in events)


def test_a_loop_that_ends_early_has_what_there_is(tmp_path, caplog):
    profiler = loop(tmp_path, 4, steps=(2, 9))
    assert profiler.trace.name == "trace-rank00000-steps2-3.json"
    assert names_in(profiler.trace).count("aten::addmm") == 2
    for count in (1, 2):
        caplog.clear()
        assert loop(tmp_path / "none", count, steps=(2, 9)).trace is None
        assert "nothing was profiled" in caplog.text


def test_each_rank_that_is_chosen(ranks, tmp_path):
    code = f"""
    from ezpz_obs import profile
    for folder, chosen in ("one", (1,)), ("all", None):
        with profile({str(tmp_path)!r} + "/" + folder, steps=(1, 2), ranks=chosen) as profiler:
            for _ in range(3):
                torch.ones(4) + RANK
                profiler.step()
        say(profiler.trace and profiler.trace.name)
    """
    found = ranks(code, 3)
    assert [rank.status for rank in found] == [0, 0, 0], [rank.err for rank in found]
    names = [f"trace-rank0000{rank}-steps1-1.json" for rank in range(3)]
    assert [rank.said for rank in found] == [[None, names[0]], [names[1]] * 2, [None, names[2]]]
    assert sorted(path.suffix for path in (tmp_path / "one").iterdir()) == [".json", ".txt"]


def test_what_cannot_be_written_ends_no_training(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert loop(tmp_path / "file" / "traces", 3, steps=(1, 2)).trace is None
    assert "no profile in" in caplog.text
    (tmp_path / "trace-rank00000-steps1-1.txt").symlink_to("/dev/full")
    assert loop(tmp_path, 3, steps=(1, 2)).trace is None
    assert "No space left" in caplog.text


@pytest.mark.parametrize(
    ("steps", "first"), [((3, 3), 0), ((5, 2), 0), ((-1, 2), 0), ((10, 13), 11)]
)
def test_steps_that_are_none(tmp_path, steps, first):
    with pytest.raises(ValueError, match="one after the last"):
        profile(tmp_path, steps=steps, first=first)


def test_without_torch(python):
    code = "from ezpz_obs import profile; profile('x', ranks={})"
    done = python(code.format("(0,)"), status=1)
    assert "ObsError: profile() uses torch's profiler" in done.stderr
    python(code.format("(1,)"))
