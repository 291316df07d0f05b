"""Run one rank's Python program, and record some steps of its training by torch's profiler.

usage: python [OPTION...] rank_profile.py FIRST:LAST FOLDER (SCRIPT | -m MODULE | -c CODE) [ARG...]
environment: RANK; EZPZ_LAUNCH_ID, the name of an attempt's own folder in FOLDER
writes: rank-RANK.json.gz, the trace; rank-RANK.txt, a line of JSON and a table of the operations
exit status: the program's own

ezpz-launch puts it between the interpreter and the program, in whatever environment that is, so it
stands alone, and needs no more than Python 3.9. torch is imported when the program does so. A step
ends when the optimizer that steps first has stepped; they are counted from 0. The one before FIRST
runs under the profiler too, but is not recorded: starting takes long.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import json
import os
import pkgutil
import re
import runpy
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from typing import Any

_OPTIMIZERS = "torch.optim.optimizer"
_COLLECTIVE = re.compile("(gloo|mpi|ucc):|nccl(Dev)?Kernel")
"""Names of events that last as long as a collective; for oneCCL torch has none."""

_ROWS, _SHOWN = 40, 10  # operations in a file, and of these on the terminal


def main(steps: str, folder: str, *words: str) -> None:
    """Run the program as Python itself would; what it raises is passed on."""
    first, _, last = steps.partition(":")
    recording = _Recording(int(first), int(last), folder)
    if _OPTIMIZERS in sys.modules:  # something that Python starts with has imported it
        recording.watch(sys.modules[_OPTIMIZERS])
    else:
        sys.meta_path.insert(0, _OnImport(recording.watch))
    try:
        _run(*words)
    except BaseException:
        hook = sys.excepthook

        def without_us(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            while trace and trace.tb_frame.f_globals is globals():
                trace = trace.tb_next
            hook(kind, error.with_traceback(trace), trace)

        sys.excepthook = without_us
        raise
    finally:
        recording.finish()


def _run(target: str, *arguments: str) -> None:
    """Run the program in a ``__main__`` of its own, which processes that it spawns look for."""
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(program)["__builtins__"] = builtins
    words, module, code = list(arguments), "", b""
    path = os.path.join(os.getcwd(), target)
    folder = os.path.dirname(os.path.realpath(path))
    if target == "-m":
        folder, module = os.getcwd(), words.pop(0)
    elif target == "-c":
        folder, path, code = "", "<string>", os.fsencode(words.pop(0))
    elif pkgutil.get_importer(path):  # a folder or an archive with a __main__.py
        folder, module = path, "__main__"
    else:
        vars(program).update(__file__=path, __loader__=SourceFileLoader("__main__", path))
        try:
            with open(path, "rb") as file:
                code = file.read()
        except OSError as error:
            why = f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
            print(f"{sys.executable}: {why}", file=sys.stderr)
            sys.exit(2)
    sys.argv = [target, *words]
    is_safe = getattr(sys.flags, "safe_path", sys.flags.isolated)  # -P is of 3.11
    if not is_safe:
        sys.path.pop(0)  # our own
    if not is_safe or folder == path:
        sys.path.insert(0, folder)
    if module:
        run_module: Any = vars(runpy)["_run_module_as_main"]  # what python -m itself calls
        run_module(module, target == "-m")
    else:
        exec(compile(code, path, "exec", dont_inherit=True), vars(program))  # noqa: S102 - asked for


class _OnImport:
    """Has a function called with torch's module of optimizers once that is imported."""

    def __init__(self, then: Callable[[Any], None]) -> None:
        self._then = then

    def find_spec(self, name: str, _path: object, _target: object = None) -> Any:
        if name != _OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_tell(module: Any) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = execute_and_tell
        return spec


class _Recording:
    """Counts the steps of a rank, and has torch's profiler record those that were asked for."""

    def __init__(self, first: int, last: int, folder: str) -> None:
        self._first, self._last, self._pid = first, last, os.getpid()
        # The program may change the working directory.
        own = os.path.join(os.path.abspath(folder), os.environ.get("EZPZ_LAUNCH_ID", ""))
        self._base = os.path.join(own, f"rank-{os.environ.get('RANK', '0')}")
        self._done = 0  # steps
        self._ends: list[float] = []  # of the steps, from that before the first, in seconds
        self._counted: Callable[[], Any] = lambda: None  # the optimizer
        self._inside = False  # whether it steps, and we hear when it has
        self._profiler: Any = None
        self._is_over = False

    def watch(self, optimizers: Any) -> None:
        self._guarded(lambda: os.makedirs(os.path.dirname(self._base), exist_ok=True))
        optimizers.register_optimizer_step_post_hook(self._count)

    def _count(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        if self._counted() is None:  # the first, or that one is gone: it was a trial
            self._counted = weakref.ref(optimizer)
        if self._counted() is optimizer and not self._is_over:
            self._done += 1
            if self._done == self._first - 1:
                self._guarded(lambda: self._begin(optimizer))
            elif not self._inside:
                self._guarded(self._advance)

    def _check(self) -> None:
        """See that none but ours records: torch dies of profilers that end each other."""
        # Where torch has it no longer, nothing is to be seen.
        profiler: Any = sys.modules["torch"].autograd.profiler
        if getattr(profiler, "_is_profiler_enabled", bool(self._ends)) != bool(self._ends):
            raise RuntimeError("the program uses torch's profiler itself at these steps")

    def _begin(self, optimizer: Any) -> None:
        self._check()
        profiling: Any = sys.modules["torch"].profiler
        actions = profiling.ProfilerAction

        def action(step: int) -> Any:
            if step < self._first:
                return actions.WARMUP
            if step < self._last:
                return actions.RECORD
            return actions.RECORD_AND_SAVE if step == self._last else actions.NONE

        self._profiler = profiling.profile(schedule=action, on_trace_ready=self._write)
        self._profiler.step_num = self._first - 1  # so that the trace has the steps' own numbers
        self._profiler.start()
        # torch calls hooks within its mark of the optimizer's step. A mark of a step of training
        # that ended there would cross that one, and Perfetto leaves out marks that cross.
        step, own = optimizer.step, vars(optimizer).get("step")

        @functools.wraps(getattr(step, "__func__", step))
        def stepped(_: object, *args: Any, **kwargs: Any) -> Any:
            before, self._inside = self._done, True
            try:
                return step(*args, **kwargs)
            finally:
                self._inside = False
                if self._done > before:
                    self._guarded(self._advance)
                if self._is_over and vars(optimizer).get("step") is ours:
                    del optimizer.step
                    if own:
                        optimizer.step = own

        ours = optimizer.step = types.MethodType(stepped, optimizer)

    def _advance(self) -> None:
        """Tell the profiler, once there is one, that a step has ended."""
        if self._profiler is None:
            return
        self._check()
        if self._done in (self._first, self._last + 1):
            torch: Any = sys.modules["torch"]
            devices = (getattr(torch, name) for name in ("cuda", "xpu"))
            next((each for each in devices if each.is_initialized()), torch.cpu).synchronize()
        self._ends.append(time.perf_counter())
        self._profiler.step()
        if self._done == self._first:  # the start of the recording is no part of a step
            self._ends = [time.perf_counter()]

    def _stop(self) -> None:
        self._check()
        self._profiler.stop()

    def _write(self, profiler: Any) -> None:
        steps = len(self._ends) - 1
        if steps < 1:
            return
        # Under its name once it is whole.
        profiler.export_chrome_trace(f"{self._base}.part.json.gz")
        os.replace(f"{self._base}.part.json.gz", f"{self._base}.json.gz")
        each = 1000 * (self._ends[-1] - self._ends[0]) / steps
        spans = [e.time_range for e in profiler.events() if _COLLECTIVE.match(e.name)]
        within = _length((span.start, span.end) for span in spans) / 1000 / steps
        told = {"recorded": steps, "ms": each, "own": max(0.0, each - within)}
        self._tell(told, _table(profiler.key_averages(), steps))

    def _tell(self, told: Mapping[str, object], table: list[str]) -> None:
        self._is_over = True
        first = json.dumps({"host": os.uname().nodename, "steps": self._done, **told})
        with open(f"{self._base}.txt", "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in (first, *table))

    def finish(self) -> None:
        """Write what there is where the program ends before the last step."""
        if os.getpid() != self._pid:
            return  # a fork of the rank
        if self._profiler is not None and not self._is_over:
            self._guarded(self._stop)
        if self._done and not self._is_over:
            self._guarded(lambda: self._tell({}, []))

    def _guarded(self, what: Callable[[], None]) -> None:
        """Do it; a profile that cannot be made ends no training."""
        try:
            what()
        except Exception as error:  # noqa: BLE001  # whatever torch's profiler comes to raise
            self._profiler, self._is_over = None, True
            try:
                self._tell({"error": str(error)}, [])
            except OSError:
                why = f"{self._base} cannot be written on {os.uname().nodename}: {error}"
                print(f"ezpz-launch: --profile: {why}", file=sys.stderr, flush=True)


def _length(spans: Iterable[tuple[float, float]]) -> float:
    """Return for how long at least one of these lasted."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length


def _table(averages: Iterable[Any], steps: int) -> list[str]:
    """Return the operations that take longest themselves, by the device where there is one."""
    rows = []
    for each in averages:
        if each.device_type.name == "CPU" or not each.is_user_annotation:
            name = "(Python, and waiting)" if each.key.startswith("ProfilerStep") else each.key
            times = each.self_device_time_total, each.self_cpu_time_total
            rows.append((*(us / 1000 / steps for us in times), each.count / steps, name))
    rows = sorted(rows, reverse=True)[:_ROWS]
    on_device = any(device for device, *_ in rows)
    lines = ["device ms    " * on_device + "   CPU ms    calls  itself, a step"]
    for device, cpu, calls, name in rows:
        lines.append(f"{device:9.3f}    " * on_device + f"{cpu:9.3f}{calls:9.1f}  {name[:70]}")
    return lines


# What ezpz-launch tells at the end.

_TOLD = re.compile(r"rank-(\d+)\.txt")


def summary(folder: str, steps: str, nproc: int) -> str:
    """Return what people are told of a profile, from the files that its ranks have written."""
    first, last = map(int, steps.split(":"))
    told: dict[int, dict[str, Any]] = {}
    table: list[str] = []
    found: list[int] = []
    with suppress(OSError), os.scandir(folder) as entries:  # none is there
        found += [int(name[1]) for each in entries if (name := _TOLD.fullmatch(each.name))]
    for rank in sorted(found):
        path = os.path.join(folder, f"rank-{rank}.txt")
        # It was killed when it wrote.
        with suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            told[rank] = json.loads(file.readline())
            table = table or file.read().splitlines()[: 1 + _SHOWN]
    if not told:
        return (
            f"profile: nothing was recorded: no rank has told of a step in {folder}; expected "
            f"steps of torch's optimizers, ranks that are not ended by a signal before step {last},"
            " and a folder that every host shares"
        )
    ended = f"the program ended after step {min(each['steps'] for each in told.values()) - 1}"
    whole = {rank: each for rank, each in told.items() if "recorded" in each}
    failed = [f"rank {n} on {e['host']}: {e['error']}" for n, e in told.items() if "error" in e]
    if not whole:
        early = f"{ended}; expected it to come to step {last}; give --profile earlier steps"
        return f"profile: nothing was recorded: {[*failed, early][0]}"
    count = min(each["recorded"] for each in whole.values())
    which = f"steps {first} to {first + count - 1}, {len(whole)} of {nproc} ranks"
    less = f" (not to {last}: {ended})" if count <= last - first else ""
    rank = min(whole)
    each, own = whole[rank]["ms"], whole[rank]["own"]
    within = f", {each - own:.2f} ms of it in collectives" if own < each else ""
    lines = [
        f"profile of {which}{less}: {folder}/rank-N.json.gz",
        "open a trace at https://ui.perfetto.dev, which reads it in your browser",
        f"rank {rank}: a step took {each:.2f} ms{within}",
    ]
    if len(whole) > 1:
        (least, fast), *_, (most, slow) = sorted((whole[rank]["own"], rank) for rank in whole)
        what = f"slowest{', outside of collectives' if within else ''}"
        lines.append(
            f"{what}: rank {slow} on {whole[slow]['host']}, {most:.2f} ms a step; fastest: rank "
            f"{fast}, {least:.2f} ms"
        )
    if failed:
        lines.append(f"{len(failed)} ranks recorded nothing, such as {failed[0]}")
    return "\n  ".join([*lines, f"rank {rank}, a step, each operation itself:", *table])


if __name__ == "__main__":
    main(*sys.argv[1:])
