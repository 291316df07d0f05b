import pytest

from ezpz_launch import Request, UsageError

COMMAND = ("python", "train.py")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc": 0}, "-n 0: expected at least 1 rank"),
        ({"ppn": -1}, "--ppn -1: expected at least 1 rank"),
        ({"nodes": 0}, "-N 0: expected at least 1 host"),
        ({"retries": -1}, "--retries -1: expected 0 or more"),
        ({"grace": -1.0}, "--grace -1.0: expected 0 seconds or more"),
        ({"idle_timeout": float("nan")}, "--idle-timeout nan: expected 0 seconds or more"),
        ({"signal_before": float("inf")}, "--signal-before inf: expected 0 seconds or more"),
        ({"only_ranks": ()}, r"--only-ranks \(\): expected ranks from 0"),
        ({"only_ranks": (-1,)}, "--only-ranks"),
        ({"launcher": "mpirun"}, "--launcher mpirun: expected one of auto, pals,"),
        ({"env": ("A",)}, "--env 'A': expected NAME=VALUE"),
        ({"tee": True}, "--tee: expected --log-dir DIR beside it"),
        ({"json": True}, "--json: expected --dry-run beside it"),
        ({"command": ()}, "no command"),
    ],
)
def test_what_cannot_be(options, message):
    with pytest.raises(UsageError, match=message):
        Request(**{"command": COMMAND, **options})


def test_what_nobody_asked_for_is_off():
    plain = Request(COMMAND)
    assert (plain.idle_timeout, plain.grace, plain.signal_before, plain.retries) == (0, 7, 0, 0)
    assert plain.only_ranks is None
    assert not any((plain.one_device, plain.tee, plain.prefix, plain.nested, plain.log_dir))
