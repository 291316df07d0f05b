"""The quick reader of TOML never contradicts the library's."""

import os
import tomllib

import pytest

from ezpz_topo._machine import PACKAGED, parse_plain

PLAIN = [
    "", "\n", "# x", "a = \"b\"#c", "a = 0\nb = 12", 'a = ["b", 3,\n  "d",\n]  # e\n',
    "a = []\n\n[t]\n[u.v]\nx = 1\n[u.w]\n[t.x]\n", 'a = "# = [ ] \' ü"', "  a = 1\n\t[t] \n",
    'a-b_1 = "x"\n1 = "y"',
]  # fmt: skip
NOT_PLAIN = [
    "a = 01", "a = 1_0", "a = +1", "a = 1.5", "a = true", "a = 2026-08-01", "a = 'x'",
    'a = "\\u0041"', 'a = """x"""', "a.b = 1", '"a" = 1', "a = {b = 1}", "[[t]]", "[ t ]",
    "a = [[1]]", "a = [1 2]", "a = [1,,2]", "a = [,]", "a = [1, # c\n 2]", "a = 1\na = 2",
    "[t]\n[t]", "[t.u]\n[t]", "a = 1\n[a]", "a = 1\n[a.b]", "a = 1 b = 2", "a =\n1", "a", "[t",
    'a = "x', 'a = "x\ny"', "= 1", "[t] a = 1", "a = [1\n", "\ufeffa = 1", "a = \"\x00\"", "# \x00",
    f"a = {10**30}",
]  # fmt: skip


def packaged():
    for entry in sorted(os.listdir(PACKAGED)):
        with open(os.path.join(PACKAGED, entry), encoding="utf-8") as file:
            yield file.read()


@pytest.mark.parametrize("text", [*PLAIN, *packaged()])
def test_the_plain_reader_reads_what_tomllib_reads(text):
    assert parse_plain(text) == tomllib.loads(text)


@pytest.mark.parametrize("text", NOT_PLAIN)
def test_the_plain_reader_leaves_the_rest(text):
    assert parse_plain(text) is None


@pytest.mark.parametrize("text", [*PLAIN, *NOT_PLAIN, next(packaged())])
def test_the_plain_reader_never_contradicts_tomllib(text):
    # every text with one character taken out: whatever is still accepted is read the same
    for at in range(len(text)):
        changed = text[:at] + text[at + 1 :]
        document = parse_plain(changed)
        if document is not None:
            assert document == tomllib.loads(changed)
