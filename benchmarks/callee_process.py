"""The process that `callee` starts: it runs code once, or calls what the code defines when told.

It is run by the peers' interpreters too, and loads only what an interpreter has loaded by itself:
whatever else there is, what is measured may load, and is to pay for.
"""

import os
import sys
import time

# Of a step of training: the memory that it goes through, and a pause in which threads go on.
_STEP_BYTES, _STEP_SECONDS = 4_000_000, 0.001


def peak_mb():  # type: ignore[no-untyped-def]  # typing would be loaded for it
    """Return the most memory that this process has held so far, in MB (10^6 bytes)."""
    if sys.platform == "linux":
        # Of this program alone: getrusage remembers the one that started it.
        with open("/proc/self/status", encoding="utf-8") as file:
            return int(file.read().split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    import resource  # noqa: PLC0415  # this system's way

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def apart():  # type: ignore[no-untyped-def]
    """Return a `print` to where standard output was; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda *words: print(*words, file=answers, flush=True)


def once(code, words):  # type: ignore[no-untyped-def]
    """Run code that prints numbers; its words are in ``sys.argv``, as a script's."""
    answer = apart()
    sys.argv[1:] = words
    exec(code, {"__name__": "__main__", "peak_mb": peak_mb, "print": answer})  # noqa: S102


def serve(code, words):  # type: ignore[no-untyped-def]
    """Answer each line of standard input (a question and a number of calls) until it ends."""
    answer = apart()
    names = {"__name__": "__main__", "words": words, "peak_mb": peak_mb}
    exec(code, names)  # noqa: S102  # the program's own code, from its own argument
    call, clock = names["call"], time.perf_counter_ns

    def typical(calls, between=lambda: None):  # type: ignore[no-untyped-def]
        taken = []
        for _ in range(calls):
            between()
            began = clock()
            call()
            taken.append(clock() - began)
        taken.sort()
        return (taken[(calls - 1) // 2] + taken[calls // 2]) / 2e9

    def mean(calls):  # type: ignore[no-untyped-def]
        began = clock()
        for _ in range(calls):
            call()
        return (clock() - began) / calls / 1e9

    def paced(calls):  # type: ignore[no-untyped-def]
        return typical(calls, between=step)

    def peak(_):  # type: ignore[no-untyped-def]
        return peak_mb() - names.get("before", 0.0)

    ways = {"typical": typical, "mean": mean, "paced": paced, "peak": peak}
    answer("ready")
    for line in sys.stdin:
        question, calls = line.split()
        answer(ways[question](int(calls)))
    names.get("close", lambda: None)()


def step():  # type: ignore[no-untyped-def]
    """Do what a training does between two calls: leave caches cold and threads time."""
    bytearray(b"x") * _STEP_BYTES
    time.sleep(_STEP_SECONDS)


if __name__ == "__main__":
    sys.path.pop(0)  # the benchmarks' own folder
    {"once": once, "serve": serve}[sys.argv[1]](sys.argv[2], sys.argv[3:])
