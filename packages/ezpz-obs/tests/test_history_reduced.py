"""Statistics by all-reduces, as thousands of ranks have them, on a few real ones."""

BOTH = """
import math, random, ezpz_obs
from ezpz_obs import _across as across

def histories():
    found = []
    for across.GATHERED in (1024, 1):
        found.append(ezpz_obs.History(cross_rank=True))
    return found

def differences(*both):
    gathered, reduced = ({**history.last, "time": 0} for history in both)
    assert gathered.keys() == reduced.keys()
    found = {}
    for name, value in gathered.items():
        metric, _, kind = name.rpartition("/")
        if value == reduced[name] or math.isnan(value) and math.isnan(reduced[name]):
            continue
        # A mean is rounded, and the spread about it is not exactly 0.
        limit = 2e-16 * abs(gathered[f"{metric}/max"]) if kind in ("mean", "std") else 0.0
        if not math.isclose(value, reduced[name], rel_tol=1e-12 if limit else 0, abs_tol=limit):
            found[name] = value, reduced[name]
    return found
"""


def test_they_are_what_a_gather_finds(ranks):
    done = ranks(BOTH + """
across.GATHERED = 1
say(ezpz_obs.History(cross_rank=True)._across.reduction)
across.is_ring = lambda *_: False  # as of NCCL, in place of gloo
chance = random.Random(RANK)
both = histories()
for step in range(60):
    scale = 10.0 ** random.Random(step).randrange(-100, 150)
    metrics = {
        "normal": chance.gauss(0, 1), "far": 1e5 + 20 * chance.random(), "jumps": scale * RANK,
        "down": -scale * chance.random(), "equal": scale, "zeros": [0.0, -0.0][RANK % 2],
        "tie": [3.0, 1.0][RANK % 2], "tiny": 1e-300 * chance.randrange(3), "n": step,
        "flag": chance.random() < 0.5, "large": 2 ** 60 + RANK * 1024,
    }
    for these in (metrics, {"high": 1e15 + RANK}):
        for history in both:
            history.update(these)
        if found := differences(*both):
            say([step, found])
say(both[1]._across._slots)
for value in (1.0, [1.0, math.nan, 2.0][RANK], 2.0 + RANK, [-math.inf, 1.0, 10 ** 400][RANK], 5.0):
    for history in both:
        history.update({"a": value, "b": RANK})
    say([both[1].last["a/max_rank"], repr(differences(*both))])
""", 3)  # fmt: skip
    assert [one.status for one in done] == [0] * 3, done[0].err + done[2].err
    for by_gloo, room, *named in (one.said for one in done):
        assert by_gloo is None, "which gathers: its all-reduce goes around all ranks twice"
        assert room == [], "no room is made for what others have, until one is not finite"
        assert named == [[rank, "{}"] for rank in (0, 1, 2, 2, 0)], "who has it is named"
