"""The training of ``ezpz test`` on the ranks that it is started on, by whichever launcher.

usage: ezpz-launch -m ezpz.test_dist [OPTION...], or srun, mpiexec, torchrun; see ezpz test --help
"""

import sys


def main() -> None:
    """Run the test with this process's words, and end with its exit status."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        from ._test.command import main as command  # noqa: PLC0415  # needs no torch

        sys.exit(command(["--help"]))
    from ._test.rank import run  # noqa: PLC0415  # 2 s

    sys.exit(run(words))


if __name__ == "__main__":
    main()
