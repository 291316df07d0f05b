"""What the ranks write arrives, byte for byte, and nothing else does."""

from collections import Counter

from tests.faults.launches import MEET_HERE, rank_program

ODD = bytes(range(256)) + b"\x1e\x1e\x1f\n\x1eezpz \x1f\x1e"


def expected(size):
    """What three ranks write: lines of their letter, and odd bytes without a newline at the end."""
    lines, rest = divmod(size, 1000)
    found = Counter(3 * ODD + 3 * rest * b"-")
    found.update(dict.fromkeys(b"abc", 996 * lines))
    found.update(dict.fromkeys(b"\xff\x00\r\n", 3 * lines))
    return found


def test_4_mb_and_any_bytes_a_rank(launch):
    size = 4 << 20
    started = launch(MEET_HERE, rank_program("writes", str(size)))
    started.ends_with(0, within=40, done=range(3))
    # Ranks may be mixed within a line: srun and Hydra do so.
    assert Counter(started.stdout) == expected(size)
    assert Counter((started.folder / "err").read_bytes()) == expected(size // 10)


WORDS = [
    "--lr", "1e-4", "-n", "5", "--", "", " ", "a b", "it's", 'a "q"', "$(touch executed)",
    "`touch executed`", "$HOME", "new\nline", "*", "~", "a;touch executed", "\\", "\\n", "%s",
    ":", "+", "--escaped", "é", "--host", "&", "#", "a=b", "\t", "!", "{a,b}",
]  # fmt: skip
VALUES = {
    "TEST_SPACES": "  a  b ", "TEST_QUOTES": 'it\'s "q" \\', "TEST_LINES": "one\ntwo\n",
    "TEST_COMMAND": "$(touch executed)`touch executed`", "TEST_COMMA": "a,b=c", "TEST_EMPTY": "",
    "TEST_UTF8": "é",
    # No sh has variables of these names: an exported function of bash, and of other programs.
    "BASH_FUNC_module%%": "() {  echo one\n}", "my.dotted": "a 'b'", "A-B": "", "é": "1",
}  # fmt: skip
LEAKED = {"MASTER_ADDR": "elsewhere", "MASTER_PORT": "1", "GROUP_RANK": "7"}


def test_each_rank_has_its_place_its_words_and_its_values(launch, place):
    told = [f"--env={name}_TOLD={value}" for name, value in VALUES.items()]
    started = launch(told, rank_program("says", *WORDS), environment={**VALUES, **LEAKED})
    started.ends_with(0, within=15)
    wanted = VALUES | {f"{name}_TOLD": value for name, value in VALUES.items()}
    apart = len(set(place.hosts)) == 3
    for rank, said in enumerate(started.ranks()):
        assert said["words"][1:] == WORDS
        assert said["read"] == "", "no standard input, where mpiexec's pipe would never end"
        env = said["environment"]
        assert {name: value for name, value in env.items() if name in wanted} == wanted
        assert said["host"] == place.hosts[rank]
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "3")
        local = ("0", "1", str(rank)) if apart else (str(rank), "3", "0")
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["NODE_RANK"]) == local
        assert env["GROUP_RANK"] == env["NODE_RANK"]
        here = "localhost" if place.launcher == "torchrun" else "127.0.0.1"
        assert env["MASTER_ADDR"] == (place.hosts[0] if apart else here)
        assert not any(name.startswith("EZPZ_CONTROL") for name in env), env
    assert len({said["environment"]["MASTER_PORT"] for said in started.ranks()} - {"1"}) == 1
    assert not list(started.folder.rglob("executed"))
