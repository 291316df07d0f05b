"""The slowest rank and host by what each computes, not by what all of them wait for."""

import json
import math

import pytest
import torch

from ezpz_dist import StragglerReport, Stragglers


def report(means, hosts, threshold=1.2):
    means = tuple(means)
    longest = tuple(2 * mean for mean in means)
    return StragglerReport(50, means, longest, (0.0,) * len(means), tuple(hosts), threshold)


def test_a_report_names_the_slowest_rank():
    found = report([0.3] * 37 + [0.412] + [0.314] * 26, [f"nid{r // 8}" for r in range(64)])
    assert (found.rank, found.host, found.median) == (37, "nid4", 0.3)
    assert found.slow_ranks == (37,)
    assert found.slow_hosts == ()
    assert str(found) == (
        "slowest: rank 37 (nid4) 412 ms a step, 1.37 x the median of 64 ranks (300 ms), "
        "at most 824 ms; 50 steps"
    )
    of_two = report([0.1, 0.4], ["a", "b"])  # the faster is the measure
    assert (of_two.median, of_two.ratio) == (0.1, pytest.approx(4))
    assert of_two.slow_hosts == ()  # a host of one rank is no more than that rank


def test_a_report_names_a_host_that_is_slow_as_a_whole():
    means = [0.1] * 16 + [0.2] * 8 + [0.1] * 7 + [0.3]
    found = report(means, [f"nid{rank // 8}" for rank in range(32)])
    assert found.slow_ranks == (31, *range(16, 24))
    assert found.slow_hosts == ("nid2",)
    assert str(found).endswith("; above 1.2 x: 9 ranks; every rank of host nid2 is slow")
    two = str(report([0.1] * 5 + [0.2] * 2, [*"aaabbbb"]))
    assert two.endswith("; above 1.2 x: ranks 5-6")


def test_reports_without_a_contrast():
    alone = report([0.1], ["a"])
    assert not alone.has_stragglers
    assert str(alone) == "rank 0 (a) 100 ms a step, at most 200 ms; 50 steps"
    assert report([0.0, 0.0], ["a", "a"]).ratio == 1
    assert report([0.0, 0.0, 0.1], ["a"] * 3).ratio == math.inf


def test_wrong_settings_are_refused():
    for arguments in ({"window": 0}, {"threshold": 1.0}, {"threshold": math.nan}):
        with pytest.raises(ValueError, match=r"Stragglers\(window=.*; expected a window of at"):
            Stragglers(**arguments)


# Rank 1 is slow in loading data; everybody else waits for it in the all-reduce.
SCRIPT = """
import contextlib, json, logging, io, time
from torch.nn.parallel import DistributedDataParallel as DDP
log = io.StringIO()
logging.basicConfig(stream=log, format="%(levelname)s %(message)s")
rank = setup_torch(timeout=60)
size = dist.get_world_size()
found = []
def note(report):
    found.append([report.rank, report.ratio, report.means, report.waits])

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
        self.unused = torch.nn.Linear(2, 2)
    def forward(self, x):
        return {"out": (self.layers(x), x)}

# Making DDP imports torch._dynamo, a second of each rank's: with four ranks only.
both = ({"bucket_cap_mb": 0.001}, {"find_unused_parameters": True})
for options in both if size == 4 else ():
    model = Net()
    if not options.get("find_unused_parameters"):
        del model.unused
    model = DDP(model, **options)
    stragglers = Stragglers(model, window=3)
    for step in range(7):
        time.sleep(0.2 if rank == 1 else 0.002)
        model(torch.ones(4, 16))["out"][0].sum().backward()
        report = stragglers.step()
        assert (report is not None) == (step in (3, 6)), step
    note(report)
    stragglers.close()

# The caller's own word for it: what is in compute() alone, or all but communication().
for kind in ("compute", "communication"):
    by_hand = Stragglers(window=4)
    for step in range(5):
        with by_hand.compute() if kind == "compute" else contextlib.nullcontext():
            time.sleep(0.2 if rank == size - 1 else 0.001)
        with by_hand.communication() if kind == "communication" else contextlib.nullcontext():
            barrier()
        report = by_hand.step()
    note(report)
for seconds in (1.0, 3.0):
    report = Stragglers(window=1).record(seconds * (rank + 1))
note(report)
# Of another window: named, not mixed up.
if size > 1:
    odd = Stragglers(window=2 if rank == size - 1 else 1)
    raises(MismatchError, "calls Stragglers(window=2).step() at <string>:",
           lambda: (odd.record(1.0), odd.record(1.0)))
print(json.dumps([found, log.getvalue()]))
cleanup()
"""


@pytest.mark.parametrize("size", [1, 4])
def test_the_slow_rank_is_named_though_all_steps_are_equally_long(ranks, size):
    outs = [json.loads(out) for out in ranks(size, SCRIPT)]
    assert all(found == outs[0][0] for found, _ in outs)
    *under_ddp, first, second, recorded = outs[0][0]
    assert len(under_ddp) == (2 if size == 4 else 0)
    means = [3.0 * (rank + 1) for rank in range(size)]
    assert recorded[:3] == [size - 1, {1: 1.0, 4: 2.0}[size], means]
    if size == 1:
        assert "WARNING" not in outs[0][1]
        return
    for rank, ratio, means, waits in under_ddp:
        assert rank == 1
        assert ratio > 1.2
        # Their sum is nearly the same everywhere: without the wait nobody would stand out.
        assert waits[1] < min(wait for rank, wait in enumerate(waits) if rank != 1)
        assert means[1] > 0.2
    assert all(rank == size - 1 and ratio > 1.2 for rank, ratio, _, _ in (first, second))
    said = [log for _, log in outs]
    assert f"WARNING slowest: rank {size - 1} (" in said[0]
    assert not any("slowest" in log for log in said[1:])


def test_a_model_that_is_closed_is_left_alone():
    model = torch.nn.Linear(2, 2)
    stragglers = Stragglers(model, window=2)
    assert stragglers.step() is None
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        found = stragglers.step()
    assert found is stragglers.report
    assert found.steps == 2
    stragglers.close()
    assert not model._forward_hooks
