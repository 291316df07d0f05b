"""The command ``ezpz``: all commands of the packages under one name."""

from __future__ import annotations

import sys

from ._streams import complain, print_page
from ._version import __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

HELP = """\
usage: ezpz COMMAND [WORD...]
       ezpz COMMAND --help

Train with PyTorch anywhere, from a laptop to a supercomputer.

run:
  launch    start a command on every rank of this job or host (ezpz-launch)
  test      train a small model on all ranks: does it work here, and how fast?
  stage     bring the environment to every node's own disk, for later launches

jobs:
  submit    queue a job that launches, by Slurm or PBS, until it is done
  jobs      yours: state, time left, last step and loss
  follow    print a job's output as it comes, until it ends
  kill      end a job, a chain of jobs, or a launch; ranks have time to save
  launches  the launches so far, and how they ended
  nodes     the nodes that launches found bad, for a day
  preflight look at every node of this job, and name those that differ

look:
  doctor    check scheduler, MPI, device, network, disk; with remedies
  topo      who is this process, who else is there, on what machine (ezpz-topo)
  report    write a run's metrics as a page with plots (ezpz-obs report)
  plot      draw them on the terminal
  tail      say what a live run records, until it ends
  export    write them as a table, CSV or Parquet
  replay    send them to another sink, such as W&B

options:
  -h, --help   this page
  --version    the version

examples:
  ezpz doctor                               what is missing here?
  ezpz test                                 a real training on all devices
  ezpz test --tp=2 --pairs                  tensor parallel; links of node pairs
  ezpz launch python train.py --lr 1e-4     your own, on every rank
  ezpz launch --dry-run python train.py     what would be started, and why
  ezpz submit -N 4 --time 2h python train.py    in a job of four nodes
  ezpz follow && ezpz report outputs/run    wait for the job, then look at it
  ezpz report outputs/run                   outputs/run/report/report.html

exit status: that of the command; 2 there is no such command"""


_OF_LAUNCH = ("stage", "submit", "jobs", "follow", "kill", "launches", "nodes", "preflight")
_OF_OBS = ("report", "plot", "tail", "export", "replay")

COMMANDS: dict[str, tuple[str, ...]] = {
    "launch": ("ezpz_launch",),
    "test": ("ezpz._test.command",),
    **{name: ("ezpz_launch", name) for name in _OF_LAUNCH},
    "doctor": ("ezpz.doctor",),
    "topo": ("ezpz_topo._cli",),
    **{name: ("ezpz_obs._cli", name) for name in _OF_OBS},
}
"""By command the module that has ``main(words)``, as its own console script has it, and the words
that come before the user's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ezpz`` with these words (default: the process's) and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        return _page(words)
    if words == ["--version"]:
        return print_page(__version__, "ezpz")
    found = COMMANDS.get(words[0])
    if found is None:
        complain(_unknown(words[0]), "ezpz")
        return 2
    from importlib import import_module  # noqa: PLC0415  # only a command needs it

    module, *first = found
    run: Callable[[Sequence[str]], int] = import_module(module).main
    # What stands behind its name is the command's own, to the last byte.
    return run([*first, *words[1:]])


def _page(words: list[str]) -> int:
    if words[:1] == ["help"] and words[1:]:
        return main([words[1], "--help"])
    status = print_page(HELP, "ezpz")
    # Nothing was asked for, and nothing was done.
    return status if words else 2


def _unknown(word: str) -> str:
    import difflib  # noqa: PLC0415  # only a wrong word needs it

    close = difflib.get_close_matches(word, COMMANDS, n=1)
    if close:
        return f"unknown command {word!r}; did you mean {close[0]!r}? See ezpz --help"
    known = f"unknown command {word!r}; expected one of {', '.join(COMMANDS)}"
    return f"{known}; a script of yours is started by ezpz launch"
