"""``--stage``, and `ezpz stage`: the environment on each node's own disk before the ranks start.

What is staged is found and read by `_archive`, and handed on by a tree of nodes: `_tree` is its
root, `stage_node` what runs on each of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from ezpz_launch._errors import LaunchError, StageError, UsageError, say
from ezpz_launch._nodes import stage_node
from ezpz_launch._nodes.archive import Source, What, ask, survey
from ezpz_launch._nodes.attempts import Preparation
from ezpz_launch._nodes.tree import Tree
from ezpz_launch._plan.launchers import LAUNCHERS
from ezpz_launch._plan.options import OPTIONS, PYTHON, Option, Options, Request, split
from ezpz_launch._plan.plan import LaunchPlan
from ezpz_launch._run.launch import Outcome, RankSettings
from ezpz_launch._run.loop import run
from ezpz_launch._run.prepare import prepare_launch
from ezpz_launch._run.record import new_id
from ezpz_launch._run.signals import Inbox, collect_signals

# What a launch does.


class Staging(Preparation):
    """What a launch stages, and how its ranks find it."""

    def __init__(
        self, planned: LaunchPlan, env: Mapping[str, str],
        replan: Callable[[Request], LaunchPlan],  # plans another launch on the same hosts
        python: str = "",  # whose environment; empty for the Python of the command
    ) -> None:  # fmt: skip
        self._planned, self._env, self._replan = planned, env, replan
        request = planned.request
        self._user_env = {**env, **dict(pair.split("=", 1) for pair in request.env)}
        machine = planned.machine
        places = (
            (env.get("EZPZ_STAGE_DIR", ""), "EZPZ_STAGE_DIR"),
            (machine.local_disk, f"local_disk of {machine.name}.toml"),
            (self._user_env.get("TMPDIR", ""), "TMPDIR"),
            ("/tmp", "no other is known"),
        )
        folder, self.why = next(place for place in places if place[0])
        self.folder, self._python = os.path.abspath(folder), python

    @cached_property
    def what(self) -> What:
        """What is staged; looked for when it is wanted: a question to the nodes needs it not."""
        request, env = self._planned.request, self._user_env
        told = ask(self._python or _program(request.command[0], env), env)
        return survey(told, env, request.stage_data, everything=request.stage == "all")

    @cached_property
    def source(self) -> Source:
        return Source(self.what, self.folder)

    @property
    def planned(self) -> LaunchPlan:
        """The launch, with what its ranks need to be the staged environment's."""
        planned, what, moved = self._planned, self.what, self.source.moved
        base = {**self._user_env, **planned.environment}
        added = dict[str, str]()
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONHOME"):
            # Who looks into conda's prefix expects all of it.
            if base.get(name) and (name != "CONDA_PREFIX" or what.has(base[name])):
                added[name] = moved(base[name])
        for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
            if base.get(name):
                entries = base[name].split(os.pathsep)
                behind = [entry for entry in entries if not what.has(entry)]  # a part, or nothing
                added[name] = os.pathsep.join(dict.fromkeys([*map(moved, entries), *behind]))
        there = moved(what.python.prefix)
        entries = base.get("PATH", os.defpath).split(os.pathsep)
        own = [moved(entry) for entry in entries if moved(entry) != entry]
        if there != what.python.prefix:
            own.insert(0, f"{there}/bin")
            if what.python.prefix != what.python.base_prefix:
                added["VIRTUAL_ENV"] = there
        # The others stay: a folder of the interpreter's has programs that are not staged.
        added["PATH"] = os.pathsep.join(dict.fromkeys([*own, *entries]))
        user_site = what.python.user_site
        below = user_site.removeprefix(what.python.user_base)  # of which the rest stays
        if moved(user_site) != user_site and moved(user_site).endswith(below):
            added["PYTHONUSERBASE"] = moved(user_site).removesuffix(below)
        changed = {name: value for name, value in added.items() if value != base.get(name)}
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            if not base.get(name):
                whose = name.partition("_")[0].lower()
                changed[name] = os.path.join(self.source.home, "caches", whose)
        changed["EZPZ_STAGED"] = self.source.root
        staged = [f"staged: {root.path}: {root.why}" for root in what.roots]
        kept = [f"not staged: {stays}" for stays in what.stays]
        command = (self._first_word, *planned.command[1:])
        notes = f"staged to {self.folder} ({self.why}): {self._size}", *staged, *kept
        notes += tuple(filter(None, [self._missed]))
        return _told(replace(planned, command=command), self._env, changed, "--stage", notes)

    @property
    def _first_word(self) -> str:
        word = self._planned.command[0]
        path = os.path.abspath(word) if os.sep in word else word
        there = self.moved(path)
        return word if there == path else there

    @property
    def _missed(self) -> str:
        """What is said of a Python that is a link to a staged one, or a script that starts it."""
        word, prefix = self._planned.command[0], self.what.python.prefix
        is_python = os.sep in word and PYTHON.fullmatch(os.path.basename(word))
        is_moved = self._first_word != word
        if self._python or not is_python or is_moved or self.moved(prefix) == prefix:
            return ""
        return (
            f"{word} is not in {prefix}, which is staged: the ranks do not start from the copy; "
            f"expected {prefix}/bin/python, or python"
        )

    @property
    def _size(self) -> str:
        return f"{self.source.size / 1e6:,.0f} MB in {self.source.count:,} files"

    def moved(self, path: str) -> str:
        return self.source.moved(path)

    def end(self) -> None:
        """Keep it: the next start finds it there."""

    def alone(self) -> int:
        """Stage without a launch; print where."""
        with collect_signals() as inbox:
            status = self.bring(inbox)
        if not status:
            print(self.source.root)
        return status

    def bring(self, inbox: Inbox) -> int:
        """Stage; StageError: some hosts do not have it, the others do."""
        nodes, wrong = len(self._planned.placement.hosts), list[Exception]()

        def order(tree: Tree) -> None:
            try:
                tree.order("stage", self.source.name, max(0.5, nodes / 2000), source=self.source)
            except Exception as error:  # noqa: BLE001  # raised below, when the nodes have gone
                wrong.append(error)
                tree.order("bye")

        tree, outcome = self._on_nodes(order, inbox)
        if wrong:
            raise wrong[0]
        if outcome.end_signal or outcome.exit_status or len(tree.whole) < nodes:
            return outcome.exit_status or 1  # the run has said why
        new = nodes - len(tree.had)
        say(
            f"staged {self._size}: {new} node{'s' * (new != 1)} got {tree.bytes / 1e6:,.0f} MB in "
            f"{tree.seconds:.1f} s ({self.source.bytes_read / 1e6:,.0f} MB were read), "
            f"{len(tree.had)} had it already: {self.source.root}"
        )
        if missed := self._missed:
            say(missed)
        return 0

    def question(self, what: str) -> str:
        """Return what the nodes have; ``what`` is ``"status"``, or ``"clean"`` to remove it."""
        with collect_signals() as inbox:
            tree, outcome = self._on_nodes(lambda tree: tree.order(what), inbox)
        if outcome.exit_status:
            raise LaunchError(f"the nodes did not answer (exit status {outcome.exit_status})")
        rows, gone = dict[str, tuple[dict[str, Any], int]](), 0
        for trees, removed in tree.answers.values():
            gone += len(removed)
            for row in trees:
                rows[row["name"]] = row, rows.get(row["name"], (row, 0))[1] + 1
        nodes = len(tree.answers)
        lines = [f"removed on {nodes} nodes: {gone} trees"] if what == "clean" else []
        for row, count in rows.values():
            used = "in use" if row["used"] else f"last used {row['age'] / 3600:.1f} h ago"
            size = f"{row['size'] / 1e6:,.0f} MB"
            lines.append(
                f"{row['name']}  {size:>10}  {count} of {nodes} nodes  {used}  {row['about']}"
            )
        return "\n".join(lines or [f"nothing is staged in {self.folder} on {nodes} nodes"])

    def _on_nodes(self, order: Callable[[Tree], None], inbox: Inbox) -> tuple[Tree, Outcome]:
        """Run `stage_node.py` once a node, by the launch's own launcher."""
        planned = self._planned
        hosts, scratch = planned.placement.hosts, self._env.get("TMPDIR") or "/tmp"
        tree = Tree(hosts, here=planned.on_this_host)
        words = (sys.executable, "-I", "-S", stage_node.__file__, self.folder)
        its = planned.request
        request = Request(
            words, ppn=1, nodes=len(hosts), hostfile=its.hostfile, launcher=its.launcher,
            machine=its.machine, options=its.options, cpu_bind="none",
            env=(*its.env, f"{stage_node.VARIABLE}={tree.where} {tree.secret}"),
            launcher_args=its.launcher_args,
        )  # fmt: skip
        tree.start()
        # Meanwhile: to look at an environment takes as long as to start them.
        threading.Thread(target=order, args=(tree,), daemon=True).start()
        try:
            settings = RankSettings(f"{new_id(time.time())}.stage", _HOLD)
            with prepare_launch(
                self._replan(request), self._env, scratch, settings=settings,
                is_over=partial(tree.join, 0.0),
            ) as (_, launch):  # fmt: skip
                threading.Thread(target=_show, args=(tree, len(hosts)), daemon=True).start()
                outcome = run(launch, inbox)
        finally:
            tree.stop()
        if tree.source and tree.source.error and not outcome.end_signal:  # no host's fault
            raise LaunchError(f"not staged on any of {len(hosts)} nodes: {tree.source.error}")
        if tree.bad and not outcome.end_signal:
            raise StageError(tree.failed(), len(hosts))
        return tree, outcome


def _told(
    planned: LaunchPlan, env: Mapping[str, str], added: Mapping[str, str], source: str,
    notes: Sequence[str],
) -> LaunchPlan:  # fmt: skip
    """Return the plan with more in its ranks' environment."""
    environment = {**planned.environment, **added}
    kind = LAUNCHERS[planned.launcher.kind]
    return replace(
        planned, environment=environment,
        sources={**planned.sources, **dict.fromkeys(added, source)},
        exported=kind.list_exported(planned.machine, environment, env),
        notes=(*planned.notes, *notes),
    )  # fmt: skip


_HOLD = 86400.0  # seconds for which a node's shim stays: its launcher would end the others


def _program(word: str, env: Mapping[str, str]) -> str:
    """Return the Python that a command starts; our own where it starts something else."""
    if not PYTHON.fullmatch(os.path.basename(word)):
        return sys.executable
    return shutil.which(word, path=env.get("PATH")) or sys.executable


def _show(tree: Tree, nodes: int) -> None:
    """Tell how far it is: on a terminal in one line, else in a line now and then."""
    if sys.stderr is None:
        return
    terminal, before, at = sys.stderr.isatty(), 0, time.monotonic()
    while not tree.join(0.5 if terminal else 10.0):
        if (source := tree.source) is None:
            continue
        got, now = tree.bytes, time.monotonic()
        rate, before, at = (got - before) / (now - at), got, now
        lacking = (nodes - len(tree.had)) * source.size - got
        left = f", {max(0, lacking) / rate:,.0f} s left" if rate else ""
        line = f"staging: {len(tree.whole)} of {nodes} nodes, {rate / 1e9:.2f} GB/s in sum{left}"
        _overwrite(f"ezpz-launch: {line}") if terminal else say(line)
    if terminal:
        _overwrite("")


def _overwrite(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


# `ezpz stage`: the same without a launch.

PAGE = """\
usage: ezpz stage [OPTION...] [ENVIRONMENT]

Bring an environment, by default the active one, to every node's own disk:
EZPZ_STAGE_DIR, else the machine's local disk, TMPDIR or /tmp. ezpz-launch
--stage then finds it there.

options:
  --stage-data PATH    this file or folder as well; repeatable
  --stage=all          what is the site's, too
  --status             what the nodes have, and whether it is in use
  --clean              remove what is not in use
  --dry-run            say what would be staged, and why
  and those of ezpz-launch that choose hosts: -N, --hostfile, --include,
  --exclude, --launcher

examples:
  ezpz stage                          once, at the job's start
  ezpz stage --status"""

_OPTIONS = (*OPTIONS, Option("status", ""), Option("clean", ""))


def read_words(words: Sequence[str]) -> tuple[Options, str]:
    """Return the options of ``ezpz stage``, and the environment; empty for the active one."""
    _, rest = split(words, _OPTIONS)
    if rest:  # options may stand behind the environment, too
        words = [*words[: -len(rest)], *rest[1:], rest[0]]
    options, found = split(words, _OPTIONS)
    if len(found) > 1:
        raise UsageError(
            f"stage: {' '.join(rest)}: expected one environment; other files: --stage-data"
        )
    return {"stage": "python", **options}, "".join(found)


def python_of(folder: str) -> str:
    python = os.path.join(os.path.abspath(folder), "bin", "python")
    marks = [os.path.join(folder, name) for name in ("pyvenv.cfg", "conda-meta")]
    if not any(map(os.path.exists, marks)) or not os.access(python, os.X_OK):
        raise UsageError(
            f"stage: {folder} is no environment (no pyvenv.cfg or conda-meta, or no "
            f"bin/python); expected a venv or conda's; for other files: --stage-data {folder}"
        )
    return python


def prepare(
    planned: LaunchPlan, env: Mapping[str, str], replan: Callable[[Request], LaunchPlan]
) -> Staging:
    """Return what a launch with ``--stage`` prepares; nothing is started yet."""
    staging = Staging(planned, env, replan)
    _ = staging.what  # what is wrong with it is told before anything starts
    return staging
