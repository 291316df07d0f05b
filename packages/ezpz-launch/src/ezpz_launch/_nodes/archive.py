"""What is staged: an environment, found, and packed into chunks, each of which is read once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import glob
import hashlib
import json
import marshal
import os
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from ezpz_launch._errors import UsageError
from ezpz_launch._nodes.stage_node import (
    CHUNK,
    MANIFEST,
    Chunk,
    File,
    Folder,
    Manifest,
    checksums,
    packed,
)

# The environment of a Python, and what of it is the user's own.

_ASK = """
import json, site, sys, sysconfig
mapped = [path for name, module in list(sys.modules.items()) if name.startswith("__editable__")
          for path in getattr(module, "MAPPING", {}).values()]
user = [site.getuserbase(), site.getusersitepackages()] if site.ENABLE_USER_SITE else ["", ""]
print(json.dumps([sys.prefix, sys.base_prefix, getattr(sys, "_base_executable", sys.executable),
                  sysconfig.get_path("stdlib"), *user, [*filter(None, sys.path)], mapped]))
"""


class Python(NamedTuple):
    """What a Python says of itself; each a path."""

    prefix: str
    base_prefix: str
    base_executable: str
    stdlib: str
    user_base: str
    user_site: str
    path: list[str]  # sys.path
    mapped: Sequence[str] = ()  # packages' own folders, to which editable installs map


def ask(python: str, env: Mapping[str, str]) -> Python:
    words = [python, "-c", _ASK]
    try:
        told = subprocess.run(
            words, env=env, capture_output=True, stdin=subprocess.DEVNULL, timeout=120, check=True
        )
        return Python(*json.loads(told.stdout))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        raise UsageError(
            f"{python} does not tell its environment ({error}); expected a Python of 3.11 or later"
        ) from error


class Root(NamedTuple):
    """A file or folder that is staged, with all below it."""

    path: str  # without links
    why: str
    skipped: tuple[str, ...] = ()  # names in it that stay
    only_python: bool = False  # whether folders in it that hold no Python stay, as links

    def has(self, path: str) -> bool:
        """Return whether a path, without links, is staged with it."""
        top, _, _ = path[len(self.path) + 1 :].partition("/")
        return is_below(path, self.path) and (not top or self.takes(f"{self.path}/{top}"))

    def takes(self, path: str) -> bool:
        """Return whether a folder that lies in it is staged."""
        name = os.path.basename(path)
        if name in self.skipped or not self.only_python or not os.path.isdir(path):
            return name not in self.skipped
        # Beside packages a project's folder holds its history, data, other environments.
        entries = os.listdir(path)
        if name.startswith(".") or "pyvenv.cfg" in entries or "conda-meta" in entries:
            return False
        python = any(entry.endswith((".py", ".pyc", ".so", ".pyi")) for entry in entries)
        info = name.endswith((".dist-info", ".egg-info"))
        # A namespace has no Python of its own.
        return python or info or glob.glob(f"{glob.escape(path)}/*/__init__.py") != []


class What(NamedTuple):
    roots: list[Root]
    prefixes: dict[str, str]  # paths that move, as they are written, and without links
    stays: list[str]  # what is the site's, with the reason
    python: Python

    def add(
        self, path: str, why: str, skipped: tuple[str, ...] = (), *, only_python: bool = False
    ) -> None:
        self.move(path)
        if os.path.exists(path) and not self.has(path):
            self.roots.append(Root(os.path.realpath(path), why, skipped, only_python))

    def add_data(self, paths: Sequence[str]) -> None:
        for path in paths:
            if not os.path.exists(path):
                raise UsageError(f"--stage-data {path}: no such file or folder; expected one")
            self.add(os.path.abspath(path), "--stage-data")

    def move(self, path: str) -> None:
        real = os.path.realpath(path)
        self.prefixes[path] = self.prefixes[real] = real

    def has(self, path: str) -> bool:
        real = os.path.realpath(path)
        return any(root.has(real) for root in self.roots)


def survey(
    python: Python, env: Mapping[str, str], data: Sequence[str], *, everything: bool
) -> What:
    """Decide what is staged; raise UsageError for what is not there."""
    what = What([], {}, [], python)
    is_venv = python.prefix != python.base_prefix
    own = is_venv or is_users(python.prefix, env)
    base_is_in = everything or is_users(python.base_prefix, env)
    if own or everything:
        # Conda's own has other environments in it, and the packages' cache.
        others = () if is_venv else ("envs", "pkgs", "conda-bld")
        what.add(python.prefix, "the active venv" if is_venv else "the active environment", others)
    else:
        what.stays.append(f"{python.prefix}: the site's Python")
    if is_venv and base_is_in:
        for path, why, skipped in _interpreter(python):
            what.add(path, why, skipped)
        what.move(python.base_prefix)
    elif is_venv:
        what.stays.append(f"{python.base_prefix}: the site's interpreter")
    for path, why in _packages(python, env):
        if what.has(path) or (is_below(path, python.base_prefix) and not base_is_in):
            continue
        if everything or is_users(path, env) or (own and why != "PYTHONPATH"):
            # Packages' own folders, and those that pip has filled, hold nothing else.
            is_whole = path in (python.user_site, *python.mapped)
            installed = glob.glob(f"{glob.escape(path)}/*.dist-info")
            what.add(path, why, only_python=not (is_whole or installed))
        else:
            what.stays.append(f"{path}: the site's ({why})")
    if not what.roots:
        raise UsageError(
            f"nothing to stage: {'; '.join(what.stays)}; expected a venv or conda environment of "
            "the user's; activate one, or --stage=all"
        )
    what.add_data(data)
    return what


def _interpreter(python: Python) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Return the files and folders of a venv's interpreter, and what of them stays."""
    lib = f"{python.base_prefix}/lib"
    if os.path.isdir(f"{python.base_prefix}/conda-meta"):
        with os.scandir(lib) as entries:  # its modules need conda's libssl, libffi and others
            folders = tuple(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        yield lib, "its interpreter's libraries", folders
    # Its packages are others' unless the venv sees them.
    packages = f"{python.stdlib}/site-packages"
    seen = any(is_below(path, packages) for path in python.path)
    yield python.stdlib, "its interpreter's library", () if seen else ("site-packages",)
    folder = os.path.dirname(python.base_executable)
    for pattern in (f"{folder}/python*", f"{lib}/libpython*"):
        for path in glob.glob(pattern):
            yield path, "its interpreter", ()


def _packages(python: Python, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Return the folders that are searched for modules, and by what they come to be."""
    given = env.get("PYTHONPATH", "").split(os.pathsep)
    for path in (*python.path, *python.mapped):
        why = "PYTHONPATH" if path in given else "a .pth file, or an editable install"
        if os.path.exists(path) and not path.endswith(".zip"):
            yield path, "the user's site-packages" if path == python.user_site else why


def is_users(path: str, env: Mapping[str, str]) -> bool:
    home = env.get("HOME", "")
    if len(home) > 1 and is_below(os.path.realpath(path), os.path.realpath(home)):
        return True
    with contextlib.suppress(OSError):
        return os.stat(path).st_uid == os.getuid() != 0
    return False


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


# Its files: looked at, packed into chunks, and each read once.

_FORMAT = 2  # of what a tree has in .ezpz
_READERS = 16  # threads that look at folders and read files: a shared file system answers late
_AHEAD = 16  # chunks that are read before they are sent

_GRAIN = 20_000_000
"""Nanoseconds in which a file may change twice and have one time: Linux's clock steps by 1 to 10 ms
(CONFIG_HZ). Some file systems keep whole seconds."""

_SECOND = 1_000_000_000


class Source:
    """What is staged, and what its chunks are read from."""

    def __init__(self, what: What, folder: str) -> None:
        self.what = what
        self._pool = concurrent.futures.ThreadPoolExecutor(_READERS)
        self._found = dict[str, Folder]()
        self._left = list[tuple[str, str]]()  # folders that stay: each one's own folder, and name
        self._is_late = False  # whether the file system answers late
        for root in what.roots:
            self._walk(root)
        self._names = dict[str, set[str]]()  # of folders that links point into
        self._folders = [
            (path, mode, files, [(name, self._target(path, target)) for name, target in links])
            for path, mode, files, links in sorted(self._found.values())
        ]
        # What stays of a project is found by links: its packages may read it, or be in it.
        links_in = {path: links for path, _, _, links in self._folders}
        for path, name in sorted(self._left):
            if f"{path}/{name}" not in self._found:
                links_in[path].append((name, f"/{path}/{name}"))
        # Version 0 writes equal values as equal bytes; repr takes six times as long.
        told = marshal.dumps([_FORMAT, CHUNK, folder, sorted(what.prefixes), self._folders], 0)
        self.name = hashlib.sha256(told).hexdigest()[:16]
        """The tree's: another where a file's path, size, mode or time has changed."""
        self.home = os.path.join(folder, f"ezpz-{os.getuid()}")
        self.root = os.path.join(self.home, self.name, "root")
        self.size = sum(file[3] for _, _, files, _ in self._folders for file in files)
        self.count = sum(len(files) for _, _, files, _ in self._folders)
        self.bytes_read = 0
        self.error = ""
        self.busy = set[concurrent.futures.Future[Chunk]]()  # chunks that are waited for
        self._lock = threading.RLock()
        self._manifest: Manifest | None = None
        self._fixed = dict[str, bytes]()

    def _walk(self, root: Root) -> None:
        above, name = os.path.split(root.path)
        parts = above.split("/")[1:]
        for depth in range(len(parts)):
            folder = "/".join(parts[: depth + 1])
            self._found.setdefault(folder, (folder, 0o700, [], []))
        if not os.path.isdir(root.path):
            self._found[above[1:]][2].append(_file(above, name, os.stat(root.path), time.time_ns()))
            return
        level = [root.path]
        while level:
            # Many folders to a thread: to hand one over takes as long as to look at one. And many
            # threads only where answers are waited for: else they fight over Python's lock.
            began, worked = time.perf_counter(), time.process_time()
            step = -(-len(level) // (_READERS if self._is_late else 1))
            shares = [level[at : at + step] for at in range(0, len(level), step)]
            is_top, level = level[0] == root.path, []
            for found, folders in chain.from_iterable(self._pool.map(_scan, shares)):
                self._found[found[0]] = found
                for each in folders:
                    if not is_top or root.takes(each):
                        level.append(each)
                    elif root.only_python:
                        self._left.append((found[0], os.path.basename(each)))
            took, worked = time.perf_counter() - began, time.process_time() - worked
            self._is_late = took > 2 * worked

    def _target(self, folder: str, target: str) -> str:
        """Return where a link points in the tree: to the tree where that holds it, else outside."""
        at = os.path.normpath(os.path.join("/", folder, target))
        for full in (at, os.path.realpath(at)):
            if self._has(full[1:]):
                return os.path.relpath(full, f"/{folder}")
        return at

    def _has(self, path: str) -> bool:
        folder, name = os.path.split(path)
        if folder in self._found and folder not in self._names:
            _, _, files, links = self._found[folder]
            self._names[folder] = {*(file[0] for file in files), *(link[0] for link in links)}
        return path in self._found or name in self._names.get(folder, ())

    def moved(self, path: str) -> str:
        """Return where a path is in the tree; itself where it is not staged."""
        for prefix in sorted(self.what.prefixes, key=len, reverse=True):
            if is_below(path, prefix):
                there = self.what.prefixes[prefix] + path[len(prefix) :]
                # Of an interpreter that others share only a part is staged.
                is_there = self._has(there[1:]) or self._has(os.path.realpath(path)[1:])
                return self.root + there if is_there else path
        return path

    def manifest(self) -> Manifest:
        with self._lock:
            if self._manifest is None:
                folders = [
                    (path, mode, [self._fix(path, file) for file in files], links)
                    for path, mode, files, links in self._folders
                ]
                about = ", ".join(root.path for root in self.what.roots[:3])
                self._manifest = Manifest(packed((folders, about)))
            return self._manifest

    def _fix(self, folder: str, file: File) -> File:
        """Return the file as it will be in the tree, where what it says of paths has to move."""
        name, mode, mtime, size, _ = file
        is_script = folder.endswith("/bin") and size < 1 << 18
        is_librarys = folder.endswith("/lib-dynload") or name.startswith("libpython")
        if not (is_script or is_librarys or name == "pyvenv.cfg" or name.endswith(".pth")
                or name.startswith("__editable__")):  # fmt: skip
            return file
        path = os.path.join(folder, name)
        with open(f"/{path}", "rb") as opened:
            data = opened.read()
        self._count(data)
        is_program = data[:4] == b"\x7fELF"
        fixed = self._moved_program(folder, data) if is_program else self._moved_text(data)
        self._fixed[path] = fixed  # it is read once, also where it stays as it is
        return file if fixed == data else (name, mode, mtime, len(fixed), 0)

    def _moved_program(self, folder: str, data: bytes) -> bytes:
        """Return a program that finds libpython from where it is: pyenv's have a path for it."""
        base = self.what.python.base_prefix
        old = os.fsencode(os.path.join(base, "lib"))
        lib = os.path.relpath(os.path.join(os.path.realpath(base), "lib"), f"/{folder}")
        new = os.fsencode(f"$ORIGIN/{lib}").ljust(len(old), b"\0")
        # Else it stays, and is found on the shared file system.
        fits = len(new) == len(old) and base in self.what.prefixes
        return data.replace(b"\0" + old + b"\0", b"\0" + new + b"\0") if fits else data

    def _moved_text(self, data: bytes) -> bytes:
        names = sorted(self.what.prefixes, key=len, reverse=True)
        pattern = rf"(?<![\w./-])({'|'.join(map(re.escape, names))})(?=[/\s\"':;,)\]]|$)"
        encoded = re.compile(os.fsencode(pattern), re.MULTILINE)
        fixed = encoded.sub(
            lambda match: os.fsencode(self.root + self.what.prefixes[os.fsdecode(match[1])]), data
        )
        first, newline, rest = fixed.partition(b"\n")
        if data[:2] == b"#!" and len(first) > 127 and b" " not in first:
            # The kernel cuts a longer one (Linux before 5.1): sh finds its way, as pip has it.
            first = b"#!/bin/sh\n'''exec' \"" + first[2:] + b'" "$0" "$@"\n' + b"' '''"
        return first + newline + rest

    def chunks(self, numbers: Sequence[int]) -> Iterator[Chunk]:
        """Return each of these chunks, as a node's store does; a few are read ahead."""
        left, ahead = iter(numbers), deque[concurrent.futures.Future[Chunk]]()
        while True:
            for number in islice(left, _AHEAD - len(ahead)):
                ahead.append(self._pool.submit(self._read, number))
            if not ahead:
                return
            first = ahead.popleft()
            self.busy.add(first)
            try:
                chunk = first.result()
            except OSError as error:
                self.error = self.error or str(error)
                raise
            finally:
                self.busy.discard(first)
            yield chunk

    def _count(self, data: bytes) -> None:
        with self._lock:
            self.bytes_read += len(data)

    def _read(self, number: int) -> Chunk:
        manifest = self.manifest()
        if number == MANIFEST:
            return number, b"", manifest.data
        pieces, parts = manifest.chunks[number], list[bytes]()
        for which, offset, length in pieces:
            path, _, mtime, size, _ = manifest.files[which]
            if (fixed := self._fixed.get(path)) is not None:
                parts.append(fixed[offset : offset + length])
                continue
            with open(f"/{path}", "rb", buffering=0) as opened:
                status = os.fstat(opened.fileno())
                parts.append(os.pread(opened.fileno(), length, offset))
            self._count(parts[-1])
            if (status.st_size, status.st_mtime_ns) != (size, mtime):
                raise OSError(f"/{path} changed while it was staged; start again")
        data = b"".join(parts)
        return number, checksums(pieces, memoryview(data)), data


def _scan(folders: Sequence[str]) -> list[tuple[Folder, list[str]]]:
    """Return what each folder is, and has: by name; and the folders in it, by path."""
    found = list[tuple[Folder, list[str]]]()
    for folder in folders:
        below, files, links = list[str](), list[File](), list[tuple[str, str]]()
        now = time.time_ns()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        files.append(_file(folder, entry.name, status, now))
                    elif entry.is_symlink():
                        links.append((entry.name, os.readlink(entry.path)))
                    elif entry.is_dir():
                        below.append(entry.path)
            mode = os.stat(folder).st_mode & 0o777
        except OSError as error:
            why = f"{error.filename or folder} cannot be read ({error.strerror})"
            raise UsageError(f"{why}; expected what the user may read") from error
        found.append(((folder[1:], mode, sorted(files), sorted(links)), below))
    return found


def _file(folder: str, name: str, status: os.stat_result, now: int) -> File:
    mode, key = status.st_mode, status.st_ctime_ns
    is_own = status.st_uid == os.getuid()
    if not (mode & 0o400 and is_own) and not os.access(f"{folder}/{name}", os.R_OK):
        raise UsageError(
            f"{folder}/{name} cannot be read (Permission denied); expected what the user may read"
        )
    # Not the mtime alone: packages' files have that of their archive, whatever is in them.
    if key > now - (_GRAIN if key % _SECOND else _SECOND):
        key = now  # it may change unseen: the next start takes it for another one
    return name, mode & 0o777, status.st_mtime_ns, status.st_size, key
