"""What is staged: an environment, found, and packed into chunks, each of which is read once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import glob
import hashlib
import json
import os
import re
import stat
import subprocess
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ._errors import UsageError
from ._stage_node import CHUNK, File, Manifest, checksums

# The environment of a Python, and what of it is the user's own.

_ASK = """
import json, site, sys, sysconfig
mapped = [path for name, module in list(sys.modules.items()) if name.startswith("__editable__")
          for path in getattr(module, "MAPPING", {}).values()]
user = [site.getuserbase(), site.getusersitepackages()] if site.ENABLE_USER_SITE else ["", ""]
print(json.dumps([sys.prefix, sys.base_prefix, getattr(sys, "_base_executable", sys.executable),
                  sysconfig.get_path("stdlib"), *user, [*filter(None, sys.path), *mapped]]))
"""


class Python(NamedTuple):
    """What a Python says of itself; each a path."""

    prefix: str
    base_prefix: str
    base_executable: str
    stdlib: str
    user_base: str
    user_site: str
    path: list[str]  # sys.path, and what editable installs map


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
    only_python: bool = False  # whether folders in it that hold no Python stay


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
        return any(is_below(real, root.path) for root in self.roots)


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
            what.add(path, why, only_python=path != python.user_site)
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
    # Its packages are others' unless the venv sees them.
    packages = f"{python.stdlib}/site-packages"
    seen = any(is_below(path, packages) for path in python.path)
    yield python.stdlib, "its interpreter's library", () if seen else ("site-packages",)
    folder = os.path.dirname(python.base_executable)
    for pattern in (f"{folder}/python*", f"{python.base_prefix}/lib/libpython*"):
        for path in glob.glob(pattern):
            yield path, "its interpreter", ()


def _packages(python: Python, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Return the folders that are searched for modules, and by what they come to be."""
    given = env.get("PYTHONPATH", "").split(os.pathsep)
    for path in python.path:
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

_READERS = 16  # threads that look at folders and read files: a shared file system answers late
_AHEAD = 16  # chunks that are read before they are sent


class Source:
    """What is staged, and what its chunks are read from."""

    def __init__(self, what: What, folder: str) -> None:
        self.what = what
        self._pool = concurrent.futures.ThreadPoolExecutor(_READERS)
        self._files = dict[str, File]()
        self._folders = dict[str, int]()
        self._links = dict[str, str]()
        for root in what.roots:
            self._walk(root)
        links = [(path, self._target(path)) for path in sorted(self._links)]
        files = sorted(self._files.values())
        self._parts = files, sorted(self._folders.items()), links
        # A tenth of the time that their repr takes.
        lines = [f"{path}\0{mode}\0{at}\0{size}\0{key}" for path, mode, at, size, key in files]
        rest = repr([1, CHUNK, folder, *self._parts[1:], sorted(what.prefixes)])
        text = "\0".join([*lines, rest]).encode(errors="surrogateescape")
        self.name = hashlib.sha256(text).hexdigest()[:16]
        """The tree's: another where a file's path, size, mode or time has changed."""
        self.home = os.path.join(folder, f"ezpz-{os.getuid()}")
        self.root = os.path.join(self.home, self.name, "root")
        self.size = sum(file[3] for file in files)
        self.count = len(files)
        self.bytes_read = 0
        self.error = ""
        self.busy = 0  # chunks that are being read
        self._lock = threading.Lock()
        self._manifest: Manifest | None = None
        self._bytes = b""
        self._fixed = dict[str, bytes]()
        self._wanted = list[int]()
        self._read = dict[int, concurrent.futures.Future[tuple[bytes, bytes]]]()

    def _walk(self, root: Root) -> None:
        for folder in _parents(root.path):
            self._folders.setdefault(folder, 0o700)
        if not os.path.isdir(root.path):
            self._files[root.path[1:]] = _file(root.path, os.stat(root.path))
            return
        level = [root.path]
        while level:
            # Many folders to a thread: to hand one over takes as long as to look at one.
            step = -(-len(level) // _READERS)
            parts = [level[at : at + step] for at in range(0, len(level), step)]
            found = [each for part in self._pool.map(_scan, parts) for each in part]
            below = list[str]()
            for folder, (mode, folders, files, links) in zip(level, found, strict=True):
                self._folders[folder[1:]] = mode
                below += [f for f in folders if folder != root.path or self._is_in(root, f)]
                self._files.update(files)
                self._links.update(links)
            level = below

    @staticmethod
    def _is_in(root: Root, folder: str) -> bool:
        name = os.path.basename(folder)
        if name in root.skipped or not root.only_python:
            return name not in root.skipped
        # Beside packages a project's folder holds its history, data, other environments.
        entries = os.listdir(folder)
        python = any(entry.endswith((".py", ".so", ".pyi")) for entry in entries)
        info = name.endswith((".dist-info", ".egg-info"))
        is_environment = "pyvenv.cfg" in entries or "conda-meta" in entries
        return (python or info) and not is_environment and not name.startswith(".")

    def _target(self, path: str) -> str:
        """Return where a link points in the tree: to the tree where that holds it, else outside."""
        target = self._links[path]
        at = os.path.normpath(os.path.join("/", os.path.dirname(path), target))
        for full in (at, os.path.realpath(at)):
            if any(full[1:] in held for held in (self._files, self._folders, self._links)):
                return os.path.relpath(full, os.path.dirname(f"/{path}"))
        return at

    def moved(self, path: str) -> str:
        """Return where a path is in the tree; itself where it is not staged."""
        for prefix in sorted(self.what.prefixes, key=len, reverse=True):
            if is_below(path, prefix):
                return self.root + self.what.prefixes[prefix] + path[len(prefix) :]
        return path

    def manifest(self) -> Manifest:
        with self._lock:
            if self._manifest is None:
                files, folders, links = self._parts
                self._manifest = Manifest(list(map(self._fix, files)), folders, links, self.about)
                self._bytes = self._manifest.to_bytes()
            return self._manifest

    @property
    def about(self) -> str:
        return ", ".join(root.path for root in self.what.roots[:3])

    @property
    def digest(self) -> str:
        self.manifest()
        return hashlib.sha256(self._bytes).hexdigest()

    def _fix(self, file: File) -> File:
        """Return the file as it will be in the tree, where what it says of paths has to move."""
        path, mode, mtime, size, _ = file
        folder, _, name = path.rpartition("/")
        is_script = folder.endswith("/bin") and size < 1 << 18
        if not (is_script or name == "pyvenv.cfg" or name.endswith(".pth")
                or name.startswith("__editable__")):  # fmt: skip
            return file
        with open(f"/{path}", "rb") as opened:
            data = opened.read()
        self.bytes_read += len(data)
        fixed = self._moved_program(data) if data[:4] == b"\x7fELF" else self._moved_text(data)
        self._fixed[path] = fixed  # it is read once, also where it stays as it is
        return file if fixed == data else (path, mode, mtime, len(fixed), "")

    def _moved_program(self, data: bytes) -> bytes:
        """Return an interpreter that finds its library beside itself: pyenv's has a path for it."""
        old = os.fsencode(os.path.join(self.what.python.base_prefix, "lib"))
        new = b"$ORIGIN/../lib".ljust(len(old), b"\0")
        fits = len(new) == len(old)  # else it stays, and is found on the shared file system
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

    # What the tree's root answers, as a node's store does.

    def wanted(self, numbers: list[int]) -> None:
        self._wanted = sorted(numbers)

    def get(self, number: int) -> tuple[bytes, bytes]:
        if number < 0:
            self.manifest()
            return b"", self._bytes
        with self._lock:
            at = bisect_left(self._wanted, number)
            ahead = self._wanted[at : at + _AHEAD]
            for each in (number, *ahead):
                if each not in self._read:
                    self._read[each] = self._pool.submit(self._read_chunk, each)
            for each in [n for n in self._read if n != number and n not in ahead][:-_AHEAD]:
                del self._read[each]
            read = self._read[number]
            self.busy += 1
        try:
            return read.result()
        except OSError as error:
            self.error = self.error or str(error)
            raise
        finally:
            with self._lock:
                self.busy -= 1

    def _read_chunk(self, number: int) -> tuple[bytes, bytes]:
        manifest = self._manifest
        assert manifest
        pieces, parts = manifest.chunks[number], list[bytes]()
        for which, offset, length in pieces:
            path, _, mtime, size, _ = manifest.files[which]
            fixed = self._fixed.get(path)
            if fixed is not None:
                parts.append(fixed[offset : offset + length])
                continue
            with open(f"/{path}", "rb", buffering=0) as opened:
                status = os.fstat(opened.fileno())
                parts.append(os.pread(opened.fileno(), length, offset))
            self.bytes_read += len(parts[-1])
            if (status.st_size, status.st_mtime_ns) != (size, mtime):
                raise OSError(f"/{path} changed while it was staged; start again")
        data = b"".join(parts)
        return checksums(pieces, memoryview(data)), data


def _parents(path: str) -> Iterator[str]:
    """Return the folders above a path, without the first slash, from the root on."""
    parts = path.split("/")[1:-1]
    return ("/".join(parts[: n + 1]) for n in range(len(parts)))


_Found = tuple[int, list[str], list[tuple[str, File]], list[tuple[str, str]]]


def _scan(folders: Sequence[str]) -> list[_Found]:
    """Return for each folder its mode, and its folders, files and links, each with its path."""
    found = list[_Found]()
    for folder in folders:
        below, files, links = list[str](), list[tuple[str, File]](), list[tuple[str, str]]()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    path = entry.path
                    if entry.is_symlink():
                        links.append((path[1:], os.readlink(path)))
                    elif entry.is_dir():
                        below.append(path)
                    elif stat.S_ISREG((status := entry.stat(follow_symlinks=False)).st_mode):
                        files.append((path[1:], _file(path, status)))
            found.append((os.stat(folder).st_mode & 0o777, below, files, links))
        except OSError as error:
            why = f"{error.filename or folder} cannot be read ({error.strerror})"
            raise UsageError(f"{why}; expected what the user may read") from error
    return found


def _file(path: str, status: os.stat_result) -> File:
    mode = status.st_mode
    if not (mode & 0o400 and status.st_uid == os.getuid()) and not os.access(path, os.R_OK):
        raise UsageError(
            f"{path} cannot be read (Permission denied); expected what the user may read"
        )
    # Not the mtime alone: packages' files have that of their archive, whatever is in them.
    return path[1:], mode & 0o777, status.st_mtime_ns, status.st_size, f"{status.st_ctime_ns:x}"


_UID = os.getuid()
