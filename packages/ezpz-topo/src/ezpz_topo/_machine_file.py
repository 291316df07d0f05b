"""One machine, one TOML file: how one is read, and what it may say."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping

from ._errors import MachineError
from ._files import read_regular
from ._plain_toml import parse_plain

TYPE_CHECKING = False  # importing typing takes 5 ms
if TYPE_CHECKING:
    from typing import Any, NoReturn

_MAX_BYTES = 1 << 20
PACKAGED = os.path.join(os.path.dirname(__file__), "machines")

SCHEDULERS = ("slurm", "pbs", "none")
LAUNCHERS = ("pals", "hydra", "openmpi", "srun", "torchrun", "spawn", "mpiexec")
BACKENDS = ("nccl", "xccl", "ccl", "gloo", "mpi")

_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")


def machine_files(env: Mapping[str, str]) -> dict[str, str]:
    """Return name → path of every machine file; the user's hide the packaged ones."""
    files: dict[str, str] = {}
    for folder, required in [*_user_folders(env), (PACKAGED, True)]:
        try:
            entries = os.listdir(folder)
        except (OSError, ValueError) as error:  # a folder's name with a NUL
            if not required and isinstance(error, FileNotFoundError | NotADirectoryError):
                continue
            raise MachineError(
                f"{folder!r} cannot be listed ({error}); expected a folder of machine "
                "files; mend EZPZ_MACHINES or make the folder"
            ) from error
        for entry in sorted(entries):
            name, extension = os.path.splitext(entry)
            if extension != ".toml" or entry.startswith("."):
                continue
            if name[0] in "-_" or not _NAME_CHARACTERS.issuperset(name):
                raise MachineError(
                    f"{os.path.join(folder, entry)}: {name!r} names no machine; expected "
                    "lower-case letters, digits, - and _; rename the file"
                )
            files.setdefault(name, os.path.join(folder, entry))
    return files


def _user_folders(env: Mapping[str, str]) -> list[tuple[str, bool]]:
    """Return (folder, whether it must be there)."""
    if env.get("EZPZ_MACHINES"):
        return [(folder, True) for folder in env["EZPZ_MACHINES"].split(os.pathsep) if folder]
    config, home = env.get("XDG_CONFIG_HOME"), env.get("HOME")
    if not config and home:
        mac = sys.platform == "darwin"
        config = os.path.join(home, "Library/Application Support" if mac else ".config")
    # Without a home there is no folder: asking the user database may hang on its server.
    return [(os.path.join(config, "ezpz", "machines"), False)] if config else []


def read_text(path: str) -> str:
    try:
        return read_regular(path, _MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        raise MachineError(
            f"{path}: cannot be read ({error}); expected a readable UTF-8 file; mend or remove it"
        ) from error


def read_rules(text: str, path: str) -> dict[str, list[str]]:
    """Return the match rules of a file, where possible from its ``[match]`` table alone.

    Every file is looked at to find the one that matches, and this table is a tenth of it.
    """
    if "match" not in text and "extends" not in text:
        return {}
    start = text.find("\n[match]\n")
    if start >= 0 and '"""' not in text and "'''" not in text:
        end = text.find("\n[", start + 1)
        return Reader(path, _parse(text[start + 1 : end + 1 or len(text)], path)).rules()
    return Reader(path, read_document(text, path)).rules()


def _parse(text: str, path: str) -> dict[str, Any]:
    plain = parse_plain(text)
    if plain is not None:
        return plain
    import tomllib  # noqa: PLC0415  # see parse_plain

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of a number with 5,000 digits
        raise MachineError(f"{path}: {error}; expected TOML; mend that line") from error


def read_document(text: str, path: str) -> dict[str, Any]:
    """Return a file's keys and values, those of the packaged machine that it extends included."""
    document = _parse(text, path)
    base = document.pop("extends", None)
    if base is None:
        return document
    below_path = os.path.join(PACKAGED, f"{base}.toml")
    if not isinstance(base, str) or os.sep in base or not os.path.isfile(below_path):
        names = sorted(machine_files({}))
        Reader(path, document).fail("extends", base, f"one of {', '.join(names)}", str(base), names)
    below = read_document(read_text(below_path), below_path)
    if os.path.basename(path) != f"{base}.toml":
        # Another machine like it has its own hosts.
        for key in ("match", "nodes", "hsn_suffix"):
            below.pop(key, None)
    return _merged(below, document, path)


def _merged(below: dict[str, Any], document: dict[str, Any], path: str) -> dict[str, Any]:
    merged = {**below, **document}
    for key, value in document.items():
        # Rules are replaced as a whole: they are looked at without the file below.
        if key != "match" and isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = {**below[key], **value}
    for mark in ("inferred", "predecessor"):
        own = Reader(path, document).texts(mark)
        kept = [key for key in below.get(mark, ()) if not has_key(document, key)]
        merged[mark] = [key for key in kept if has_key(merged, key)] + list(own)
    return merged


def has_key(document: Mapping[str, Any], dotted: str) -> bool:
    """Return whether a dotted key, such as ``options.scale``, is in a document."""
    here: Any = document
    for part in dotted.split("."):
        if not isinstance(here, dict) or part not in here:
            return False
        here = here[part]
    return True


class Reader:
    """Takes typed values out of one document, and says what is wrong with which key."""

    def __init__(self, path: str, document: Mapping[str, Any], prefix: str = "") -> None:
        self.path, self.document, self.prefix = path, document, prefix

    def fail(
        self, key: str, value: object, expected: str, word: str = "", known: Iterable[str] = ()
    ) -> NoReturn:
        import difflib  # noqa: PLC0415  # only an error pays for it

        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        close = difflib.get_close_matches(word, list(known), 1)
        hint = f"did you mean {close[0]!r}?" if close else "mend this key"
        raise MachineError(
            f"{self.path}: {self.prefix}{key} = {shown}; expected {expected}; {hint}"
        )

    def only(self, known: Iterable[str]) -> None:
        for key, value in self.document.items():
            if key not in known:
                self.fail(key, value, f"no such key, but {', '.join(known)}", key, known)

    def text(self, key: str, choices: tuple[str, ...] = (), *, required: bool = False) -> str:
        value = self.document.get(key, "")
        expected = f"one of {', '.join(choices)}" if choices else "a string"
        self._require(key, required, expected)
        if not isinstance(value, str) or (choices and value and value not in choices):
            self.fail(key, value, expected, value if isinstance(value, str) else "", choices)
        return value

    def _require(self, key: str, required: bool, expected: str) -> None:
        if required and not self.document.get(key):
            raise MachineError(f"{self.path}: no {self.prefix}{key}; expected {expected}; add it")

    def date(self) -> str:
        # TOML has dates too, but none without a day.
        value = str(self.document.get("date", ""))
        if not re.fullmatch(r"20[0-9]{2}-(0[1-9]|1[0-2])(-(0[1-9]|[12][0-9]|3[01]))?", value):
            self.fail("date", value, 'when the source was read, such as "2026-08"')
        return value

    def count(self, key: str) -> int | None:
        value = self.document.get(key)
        if value is not None and (type(value) is not int or value < 0):
            self.fail(key, value, "a number of 0 or more")
        return value

    def texts(
        self, key: str, choices: tuple[str, ...] = (), *, required: bool = False
    ) -> tuple[str, ...]:
        value = self.document.get(key, [])
        self._require(key, required, "a list of strings")
        if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
            self.fail(key, value, "a list of strings")
        # One line each: they become arguments of a command.
        if any(not v.isprintable() for v in value):
            self.fail(key, value, "strings without line ends and control characters")
        for item in value:
            if choices and item not in choices:
                self.fail(key, value, f"a list of {', '.join(choices)}", item, choices)
        return tuple(value)

    def counts(self, key: str) -> tuple[int, ...]:
        value = self.document.get(key, [])
        if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value):
            self.fail(key, value, "a list of numbers of 0 or more")
        return tuple(value)

    def table(self, key: str) -> Reader:
        value = self.document.get(key, {})
        if not isinstance(value, dict):
            self.fail(key, value, f"a table, [{self.prefix}{key}]")
        return Reader(self.path, value, f"{self.prefix}{key}.")

    def tables(self, key: str) -> list[tuple[str, Reader]]:
        return [(name, self.table(key).table(name)) for name in self.table(key).document]

    def variables(self, key: str) -> dict[str, str]:
        table = self.table(key)
        for name, value in table.document.items():
            if not name.isidentifier() or not isinstance(value, str) or "\0" in value:
                table.fail(name, value, "a variable and its value as a string")
        return dict(table.document)

    def rules(self) -> dict[str, list[str]]:
        """Return ``[match]``: domains, hostnames, and variables with their values."""
        table, rules, known = self.table("match"), {}, ("domains", "hostnames")
        for key, value in table.document.items():
            variable = key.isidentifier() and key.isupper()
            if key not in known and not variable:
                table.fail(key, value, "domains, hostnames or a VARIABLE", key, known)
            one = variable and isinstance(value, str) and value
            rules[key] = [value] if one else list(table.texts(key))
            for item in rules[key]:
                if key == "domains" and item.startswith("."):
                    table.fail(key, item, "a domain without the dot before it")
                if key == "hostnames" and "#" in item[:-1]:
                    table.fail(key, item, "a short name, with # at its end for any number")
        return rules

    def binds(self, devices: int | None) -> dict[str, tuple[str, ...]]:
        """Return ``[cpu_bind]``: under each name one range of cores for each local rank."""
        table, reserved = self.table("cpu_bind"), set(self.counts("reserved_cores"))
        for name in table.document:
            ranges = table.texts(name)
            if len(ranges) != (devices or 0):
                table.fail(name, list(ranges), f"{devices or 'no'} ranges, as devices_per_node has")
            taken = set(reserved)
            for text in ranges:
                cores = _cores(text)
                if not cores:
                    table.fail(name, text, "cores low-high, such as 4-7 or 0-7,104-111")
                if not taken.isdisjoint(cores):
                    table.fail(name, text, "cores that no other rank has and none is reserved")
                taken |= cores
        return {name: table.texts(name) for name in table.document}


def _cores(text: str) -> set[int]:
    """Return the cores of ``0-7,104-111``; none where it does not parse."""
    cores: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.partition("-")
        ends = (low, high if dash else low)
        if not all(n.isascii() and n.isdecimal() and len(n) < 6 and n == str(int(n)) for n in ends):
            return set()
        span = range(int(ends[0]), int(ends[1]) + 1)
        if not span or not cores.isdisjoint(span):
            return set()
        cores.update(span)
    return cores
