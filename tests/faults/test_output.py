"""What the ranks write arrives, byte for byte, and nothing else does."""

import json

import pytest
from tests.faults.launches import MEET_HERE, rank_program


def counts(text):
    return {bytes([byte]): text.count(bytes([byte])) for byte in set(text)}


def expected(size):
    lines, rest = divmod(size, 1000)
    found = {b"%c" % letter: 996 * lines for letter in b"abc"}
    found |= {b"%c" % end: 3 * lines for end in b"\xff\x00\r\n"}
    return found | ({b"-": 3 * rest} if rest else {})


@pytest.mark.with_torchrun
def test_10_mb_a_rank(launch):
    size = 10 << 20
    started = launch(MEET_HERE, rank_program("writes", str(size)))
    assert started.ends(within=40) == 0, started.stderr[-2000:]
    assert started.done() == [0, 1, 2]
    # Ranks may be mixed within a line: srun and Hydra do so.
    assert counts(started.stdout) == expected(size)
    err = (started.folder / "err").read_bytes()
    assert counts(err) == expected(size // 10)
    started.leaves_nothing()


def test_any_bytes(launch):
    started = launch(MEET_HERE, rank_program("writes_odd_bytes"))
    assert started.ends(within=10) == 0, started.stderr
    odd = bytes(range(256)) + b"\x1e\x1e\x1f\n\x1eezpz \x1f\x1e"
    assert counts(started.stdout) == {byte: 3 * count for byte, count in counts(odd).items()}
    err = (started.folder / "err").read_bytes()
    assert counts(err) == {byte: 3 * count for byte, count in counts(odd).items()}
    started.leaves_nothing()


WORDS = [
    "--lr", "1e-4", "-n", "5", "--", "", " ", "a b", "it's", 'a "q"', "$(touch executed)",
    "`touch executed`", "$HOME", "new\nline", "*", "~", "a;touch executed", "\\", "\\n", "%s",
    ":", "+", "é", "--host", "&", "#", "a=b", "\t", "!", "{a,b}",
]  # fmt: skip
VALUES = {
    "TEST_SPACES": "  a  b ",
    "TEST_QUOTES": 'it\'s "q" \\',
    "TEST_COMMAND": "$(touch executed)`touch executed`",
    "TEST_LINES": "one\ntwo\n",
    "TEST_COMMA": "a,b=c",
    "TEST_EMPTY": "",
    "TEST_UTF8": "é",
}


@pytest.mark.with_torchrun
def test_words_and_values_pass_unharmed(launch):
    told = [f"--env={name}_TOLD={value}" for name, value in VALUES.items()]
    started = launch(told, rank_program("says", *WORDS), environment=VALUES)
    assert started.ends(within=15) == 0, started.stderr
    wanted = VALUES | {f"{name}_TOLD": value for name, value in VALUES.items()}
    for said in started.ranks():
        assert said["words"][1:] == WORDS
        seen = {name: value for name, value in said["environment"].items() if name in wanted}
        assert seen == wanted
    assert not list(started.folder.rglob("executed"))
    started.leaves_nothing()


def test_each_rank_sees_its_place(launch):
    leaked = {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "GROUP_RANK": "7"}
    started = launch([], rank_program("says"), environment=leaked)
    assert started.ends(within=15) == 0, started.stderr
    hosts = list(started.place.hosts)
    apart = len(set(hosts)) == 3
    ports = set[str]()
    for rank, said in enumerate(started.ranks()):
        env = said["environment"]
        assert said["host"] == hosts[rank]
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "3")
        local = ("0", "1", str(rank)) if apart else (str(rank), "3", "0")
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["NODE_RANK"]) == local
        assert env["GROUP_RANK"] == env["NODE_RANK"]
        assert env["MASTER_ADDR"] == (hosts[0] if apart else "127.0.0.1")
        ports.add(env["MASTER_PORT"])
        assert "EZPZ_CONTROL" not in env, json.dumps(env, indent=1)
    assert len(ports) == 1
    assert ports != {"1"}
    started.leaves_nothing()


@pytest.mark.with_torchrun
def test_standard_input_is_empty(launch):
    """Of every rank, for itself and for what it starts; mpiexec's pipe would never end."""
    script = "cat && sh -c 'cat && echo read'"
    started = launch([], ["sh", "-c", script])
    assert started.ends(within=15) == 0, started.stderr
    assert started.stdout == b"read\n" * 3
    started.leaves_nothing()
