"""Program: one node's part in staging: it fetches what is staged, unpacks it, and hands it on.

ezpz-launch starts it once on each node: ``python -I -S _stage_node.py FOLDER``, with ``EZPZ_STAGE``
(where ezpz-launch listens, and a secret). It needs the standard library alone, and few files of it.

A tree is staged in chunks. Each node asks its parent, another node, for the chunks that it lacks,
and answers its own children: from memory what is still to be written, from its disk the rest. So a
parent that dies can be replaced by any other node, and a node that has a file already needs none.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import marshal
import os
import shutil
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from queue import Queue
from typing import Any, BinaryIO

if __name__ == "__main__":  # a program without site packages: this package's folder is enough
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from ezpz_launch._run.agent import connect
from ezpz_launch._run.channel import is_signed, sign
from ezpz_launch._run.processes import environments_of_other_processes

VARIABLE = "EZPZ_STAGE"

CHUNK = 4 << 20  # bytes of a chunk, at most: a node hands a chunk on when it has all of it
MANIFEST = -1  # the number of the chunk that is the manifest
_PIECES = 512  # files of a chunk, at most
_DIGEST = 16  # bytes of a piece's checksum
_UNWRITTEN = 32  # chunks that wait for the disk, before no more are fetched
_TRIES = 3  # times that a chunk is asked for whose checksum is wrong
_SLACK = 64 << 20  # bytes of the disk that are left free
_BLOCK = 4096  # bytes that a file takes in multiples of
_WAIT = 60  # seconds for another node to prove who it is
_YOUNG = 600.0  # seconds after its last use for which a tree is not removed to make room
_OLD = 7 * 86400.0  # seconds after its last use from which it always is
_HEADER = struct.Struct(">iII")


class NodeError(Exception):
    """What this node cannot do; its text is told ezpz-launch, which names the node."""


# What is staged: a manifest, and the chunks that follow from it.


File = tuple[str, int, int, int, int]
"""Name, mode, mtime in ns (Python compares it with what a .pyc says), size, and a key that no other
version of it has; 0 is that of a file that no other tree has."""

Folder = tuple[str, int, list[File], list[tuple[str, str]]]
"""Path below the tree's root (the original's without its first slash), mode, files, links."""

Piece = tuple[int, int, int]  # a part of a chunk: the file's number, where in it, how many bytes
Chunk = tuple[int, bytes, bytes]  # its number, its pieces' checksums one after the other, its bytes


class Manifest:
    """What a tree holds, of the bytes that are sent, and kept in it; ValueError: damaged."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.folders: list[Folder]
        self.about: str
        self.folders, self.about = unpacked(data)

    @cached_property
    def files(self) -> list[File]:
        """Return all files, each with its path below the tree's root in place of its name."""
        return [
            (os.path.join(path, file[0]), *file[1:])
            for path, _, files, _ in self.folders
            for file in files
        ]

    @cached_property
    def chunks(self) -> list[list[Piece]]:
        chunks, size = [list[Piece]()], 0
        for number, file in enumerate(self.files):
            # A file is cut at multiples of CHUNK, whatever comes before it: checksums stay true.
            for offset in range(0, max(file[3], 1), CHUNK):
                length = min(CHUNK, file[3] - offset)
                if chunks[-1] and (size + length > CHUNK or len(chunks[-1]) == _PIECES):
                    chunks.append([])
                    size = 0
                chunks[-1].append((number, offset, length))
                size += length
        return chunks


def packed(value: Any) -> bytes:
    """Return a value with its checksum. Marshal takes a tenth of the time of JSON."""
    body = marshal.dumps(value, 4)  # the version that every Python from 3.4 on reads
    return hashlib.sha256(body).digest() + body


def unpacked(data: bytes) -> Any:
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise ValueError("damaged")
    return marshal.loads(data[32:])  # noqa: S302 - checked, and written by us


def checksums(pieces: Sequence[Piece], data: memoryview) -> bytes:
    """Return a chunk's, one after the other: made where a file is read, checked at its end."""
    found, at = [], 0
    for _, _, length in pieces:
        found.append(hashlib.sha256(data[at : at + length]).digest()[:_DIGEST])
        at += length
    return b"".join(found)


# Connections, between nodes and to ezpz-launch: each side shows that it knows the secret.


def say(connection: socket.socket, *words: object) -> None:
    connection.sendall(json.dumps(words).encode() + b"\n")


def hear(file: BinaryIO) -> list[Any]:
    """Return the next line; OSError: there is none."""
    line = file.readline(4096)
    words = json.loads(line) if line.endswith(b"\n") else None
    if not isinstance(words, list) or not words:
        raise ConnectionError("closed")
    return words


def introduce(connection: socket.socket, file: BinaryIO, secret: str, node: int) -> None:
    """Prove to who accepted a connection that we are a node of this launch; see that it is, too."""
    _, challenge = hear(file)
    own = os.urandom(16).hex()
    say(connection, "hello", node, own, sign(secret, node, "child", challenge, own))
    word, shown = hear(file)
    if word != "welcome" or not is_signed(shown, secret, node, "parent", own, challenge):
        raise ConnectionError("no node of this launch")


def is_introduced(words: list[Any], secret: str, challenge: str) -> str:
    """Return our answer to a ``hello``; empty where it proves nothing."""
    if len(words) != 4 or words[0] != "hello" or not isinstance(words[1], int):
        return ""
    node, own, shown = words[1], str(words[2]), str(words[3])
    if not is_signed(shown, secret, node, "child", challenge, own):
        return ""
    return sign(secret, node, "parent", own, challenge)


def _receive(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise ConnectionError("closed")
    return data


def serve(
    server: socket.socket, secret: str, chunks: Callable[[Sequence[int]], Iterable[Chunk]]
) -> None:
    """Answer every child that connects, each in a thread of its own, until the server is closed."""
    with contextlib.suppress(OSError):
        while True:
            words = (server.accept()[0], secret, chunks)
            threading.Thread(target=_serve_child, args=words, daemon=True).start()


def _serve_child(
    connection: socket.socket, secret: str, chunks: Callable[[Sequence[int]], Iterable[Chunk]]
) -> None:
    # Where we fail, or the child, the connection ends: it asks another one.
    with connection, connection.makefile("rb") as file, contextlib.suppress(OSError, ValueError):
        connection.settimeout(_WAIT)
        challenge = os.urandom(16).hex()
        say(connection, "challenge", challenge)
        answer = is_introduced(hear(file), secret, challenge)
        if not answer:
            return
        say(connection, "welcome", answer)
        connection.settimeout(None)
        while True:
            (count,) = struct.unpack(">I", _receive(file, 4))
            wanted = struct.unpack(f">{count}i", _receive(file, 4 * count))
            for number, sums, data in chunks(wanted):
                connection.sendall(_HEADER.pack(number, len(sums), len(data)) + sums)
                connection.sendall(data)


def _request(connection: socket.socket, file: BinaryIO, numbers: Sequence[int]) -> Iterator[Chunk]:
    """Ask a parent for chunks; return each as it comes, unchecked."""
    connection.sendall(struct.pack(f">I{len(numbers)}i", len(numbers), *numbers))
    for _ in numbers:
        number, length, size = _HEADER.unpack(_receive(file, _HEADER.size))
        if size > 2 * CHUNK and number != MANIFEST:
            raise ConnectionError("what it sends is not what was asked for")
        yield number, _receive(file, length), _receive(file, size)


# Trees on this node's disk, in a folder of the user's own.


def own_folder(folder: str) -> str:
    """Return ``ezpz-UID`` in a folder, made if need be; NodeError: it is not safe there."""
    path = os.path.join(folder, f"ezpz-{os.getuid()}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
    except OSError as error:
        raise NodeError(
            f"{path} cannot be made ({error.strerror}); expected a folder on the node's own disk; "
            "name another: EZPZ_STAGE_DIR"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        what = f"of user {found.st_uid}" if stat.S_ISDIR(found.st_mode) else "no folder"
        raise NodeError(f"{path} is {what}; expected a folder of this user's own; remove it")
    if found.st_mode & 0o077:
        os.chmod(path, 0o700)
    return path


def read_tree(tree: str) -> tuple[Manifest, list[bytes]] | None:
    """Return what a tree holds, and its chunks' checksums; None where it has none that is right."""
    try:
        with open(f"{tree}/.ezpz/manifest", "rb") as file:
            manifest = Manifest(file.read())
        with open(f"{tree}/.ezpz/checksums", "rb") as file:
            return manifest, unpacked(file.read())
    except (OSError, ValueError, TypeError, EOFError):
        return None


def whole_tree(tree: str) -> tuple[Manifest, list[bytes]] | None:
    """Return the same of a tree that has all its files: what cleans /tmp removes single ones."""
    # A tree is renamed when it is whole, so only folders are looked at that have changed since
    # then: in one of them Python may have compiled something, or a file is gone.
    if (found := read_tree(tree)) is None:
        return None
    try:
        made = os.stat(f"{tree}/.ezpz/checksums").st_ctime_ns
        for path, _, files, _ in found[0].folders:
            folder = f"{tree}/root/{path}"
            # The same time is no proof: the clock has a grain.
            if os.lstat(folder).st_ctime_ns >= made and not all(
                is_intact(f"{folder}/{file[0]}", file) for file in files
            ):
                return None
    except OSError:
        return None
    return found


def is_intact(path: str, file: File) -> bool:
    """Return whether a file is as it was written."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    same = found.st_size == file[3] and found.st_mtime_ns == file[2]
    return same and stat.S_ISREG(found.st_mode)


def trees(home: str) -> list[tuple[float, str]]:
    """Return when each whole tree was used last, and its name; the oldest first."""
    found = []
    for name in os.listdir(home):
        if len(name) == 16 and "." not in name:
            with contextlib.suppress(OSError):
                found.append((os.stat(os.path.join(home, name, ".ezpz")).st_mtime, name))
    return sorted(found)


def in_use(home: str) -> set[str]:
    """Return the names of trees that a process of this user's was started in."""
    mark = f"{home}/".encode()
    staged = (its.get(b"EZPZ_STAGED", b"") for _, its in environments_of_other_processes())
    return {os.fsdecode(each[len(mark) :][:16]) for each in staged if each.startswith(mark)}


def clean(home: str, goes: Callable[[float], bool], kept: str = "") -> list[str]:
    """Remove what a crash has left and, by the seconds since their last use, trees not in use."""
    removed = []
    for name in os.listdir(home):
        if ".part-" in name:
            with contextlib.suppress(OSError):
                folder = os.open(os.path.join(home, name), os.O_RDONLY | os.O_DIRECTORY)
                try:
                    # Its maker holds the lock as long as it lives.
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(os.path.join(home, name), ignore_errors=True)
                finally:
                    os.close(folder)
    used = in_use(home) | {kept}
    for when, name in trees(home):
        if name not in used and goes(time.time() - when):
            removed.append(name)
            _remove(os.path.join(home, name))
    return removed


def _remove(tree: str) -> None:
    """Remove a tree so that what is left is never taken for whole."""
    aside = f"{tree}.part-{os.urandom(4).hex()}"
    with contextlib.suppress(OSError):
        os.rename(tree, aside)
        shutil.rmtree(aside, ignore_errors=True)


# This node: what it has, what it fetches, and the tree that it makes.


class RankSettings:
    """The connection to ezpz-launch."""

    def __init__(self, connection: socket.socket, secret: str, me: int) -> None:
        self.connection, self.secret, self.me = connection, secret, me
        self.file = connection.makefile("rb")
        introduce(connection, self.file, secret, me)
        self._speaks = threading.Lock()

    def tell(self, *words: object) -> None:
        # Where it is gone, hearing tells.
        with self._speaks, contextlib.suppress(OSError):
            say(self.connection, *words)


class Node:
    def __init__(self, home: str, name: str, every: float, control: RankSettings) -> None:
        self._home, self._tree = home, os.path.join(home, name)
        self._control, self._tell = control, control.tell
        self._every, self._told = every, 0.0  # seconds between two reports, and when the last was
        self._part, self._lock, self._root = "", -1, -1
        self._skip: set[int] = set()  # files that an older tree had
        self._queue: Queue[Chunk] = Queue(_UNWRITTEN)
        self._turn, self._changed = threading.Lock(), threading.Condition()
        self._lacking = {MANIFEST}  # chunks that are not on the disk; this one tells the others
        self._held: dict[int, Chunk] = {}  # of these, what has come
        self._has_failed = False
        self._parent: socket.socket | None = None
        self._manifest: Manifest | None = None
        self._sums: dict[int, bytes] = {}  # of chunks that have come, or were here
        self._bytes = 0
        found = whole_tree(self._tree)
        self.is_whole = found is not None
        if found:
            os.utime(os.path.join(self._tree, ".ezpz"))
            self._open(self._tree)
            self._manifest, self._sums = found[0], dict(enumerate(found[1]))
            self._lacking = set()

    def _open(self, tree: str) -> None:
        self._root = os.open(os.path.join(tree, "root"), os.O_RDONLY | os.O_DIRECTORY)

    def _wait(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_failed or is_so())
        if self._has_failed:
            raise ConnectionError("this node has failed")

    def read(self, number: int) -> Chunk:
        """Return a chunk when there is one."""
        self._wait(lambda: number in self._held or number not in self._lacking)
        if held := self._held.get(number):
            return held
        manifest = self._manifest
        assert manifest
        if number == MANIFEST:
            return number, b"", manifest.data
        parts = []
        for which, offset, length in manifest.chunks[number]:
            fd = os.open(manifest.files[which][0], os.O_RDONLY, dir_fd=self._root)
            try:
                parts.append(os.pread(fd, length, offset))
            finally:
                os.close(fd)
        return number, self._sums[number], b"".join(parts)

    def fetch(self, address: str, parent: int, digest: str) -> None:
        """Get what is missing from a parent; say that we are an orphan where it stops answering."""
        # One at a time: while a thread waits for the disk we may be given another parent.
        with self._turn:
            try:
                if not self.is_whole:
                    self._fetch_from(address, parent, digest)
            except (OSError, ValueError) as error:
                self._tell("orphan", parent, str(getattr(error, "strerror", None) or error))
            except NodeError as error:
                self.fail(str(error))

    def leave(self) -> None:
        """Wait for no more of the present parent."""
        if self._parent is not None:
            with contextlib.suppress(OSError):
                self._parent.shutdown(socket.SHUT_RDWR)

    def fail(self, why: str) -> None:
        self._tell("failed", why)
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()
        self.remove()

    def remove(self) -> None:
        """Remove what is not whole; another thread that does it already is waited for."""
        with self._changed:
            part, self._part = self._part, ""
            if part:
                shutil.rmtree(part, ignore_errors=True)

    def _fetch_from(self, address: str, parent: int, digest: str) -> None:
        connection = connect([address], _WAIT)
        if connection is None:
            raise ConnectionError("it does not answer")
        self._parent = connection
        with connection, connection.makefile("rb") as file:
            introduce(connection, file, self._control.secret, self._control.me)
            if self._manifest is None:
                ((_, _, data),) = _request(connection, file, [MANIFEST])
                if data[:32].hex() != digest:
                    raise ConnectionError("its list of what is staged is not the launch's")
                self._prepare(Manifest(data))
            self._fetch(connection, file, parent)
        self._wait(lambda: not self._lacking)
        with self._disk():
            self._complete()
        self.is_whole = True
        self._tell("whole", self._bytes)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """What the disk refuses is no fault of a parent's."""
        try:
            yield
        except OSError as error:
            raise NodeError(f"{self._home}: {error.strerror}") from error

    def _prepare(self, manifest: Manifest) -> None:
        """Link what older trees have, see that there is room; start writing."""
        with self._disk():
            lacking = self._make(manifest)
        self._manifest = manifest
        for _ in range(min(8, max(2, (os.cpu_count() or 2) // 4))):
            threading.Thread(target=self._write_all, args=(manifest,), daemon=True).start()
        with self._changed:
            self._lacking = lacking
            self._changed.notify_all()

    def _make(self, manifest: Manifest) -> set[int]:
        """Make the folders and links of a tree; return the chunks that it lacks then."""
        self._part = f"{self._tree}.part-{os.urandom(4).hex()}"
        os.mkdir(self._part, 0o700)
        self._lock = os.open(self._part, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        root = os.path.join(self._part, "root")
        os.mkdir(root, 0o700)
        self._open(self._part)
        for path, *_ in manifest.folders:
            os.makedirs(os.path.join(root, path), 0o700, exist_ok=True)
        known = self._link(manifest, root)
        self._skip = set(known)
        lacking, needed = set[int](), 0
        for number, pieces in enumerate(manifest.chunks):
            missing = [length for which, _, length in pieces if which not in known]
            needed += sum(-(-length // _BLOCK) * _BLOCK for length in missing)
            if missing:
                lacking.add(number)
            else:
                self._sums[number] = b"".join(known[n][at // CHUNK] for n, at, _ in pieces)
        self._require_room(needed, len(manifest.files) - len(known))
        return lacking

    def _link(self, manifest: Manifest, root: str) -> dict[int, list[bytes]]:
        """Link the files that whole trees here have; return their checksums, by pieces."""
        wanted = {file: number for number, file in enumerate(manifest.files) if file[4]}
        known: dict[int, list[bytes]] = {}
        for _, name in reversed(trees(self._home)):
            tree = os.path.join(self._home, name)
            found = read_tree(tree) if len(known) < len(wanted) else None
            for file, sums in _sums_of_files(*found) if found else ():
                number, old = wanted.get(file, -1), f"{tree}/root/{file[0]}"
                if number >= 0 and number not in known and is_intact(old, file):
                    # A disk without links, or with too many of one file: it is fetched.
                    with contextlib.suppress(OSError):
                        os.link(old, f"{root}/{file[0]}")
                        known[number] = sums
        return known

    def _require_room(self, needed: int, files: int) -> None:
        def room() -> bool:
            disk = os.statvfs(self._home)
            enough = disk.f_bavail * disk.f_frsize >= needed + _SLACK
            return enough and (not disk.f_files or disk.f_favail >= files)

        if not room():
            clean(self._home, lambda age: age > _YOUNG and not room())
        if not room():
            disk = os.statvfs(self._home)
            raise NodeError(
                f"{self._home} has {disk.f_bavail * disk.f_frsize / 1e6:,.0f} MB free; expected "
                f"{(needed + _SLACK) / 1e6:,.0f} MB for {files:,} files; make room (ezpz stage "
                "--clean), or name another disk: EZPZ_STAGE_DIR"
            )

    def _fetch(self, connection: socket.socket, file: BinaryIO, parent: int) -> None:
        manifest = self._manifest
        assert manifest
        wanted = sorted(self._lacking - self._sums.keys())
        for _ in range(_TRIES):
            damaged = list[int]()
            for number, sums, data in _request(connection, file, wanted):
                if number not in wanted:
                    raise ConnectionError("what it sends is not what was asked for")
                if checksums(manifest.chunks[number], memoryview(data)) != sums:
                    damaged.append(number)
                    continue
                self._bytes += len(data)
                self._sums[number] = sums
                chunk = number, sums, data
                with self._changed:
                    self._held[number] = chunk
                    self._changed.notify_all()
                self._queue.put(chunk)
                if time.monotonic() - self._told > self._every:
                    self._told = time.monotonic()
                    self._tell("got", self._bytes)
            if not (wanted := damaged):
                return
        self._tell("corrupt", parent, f"chunk {wanted[0]} came {_TRIES} times damaged")
        raise ConnectionError("what it sends is damaged")

    def _write_all(self, manifest: Manifest) -> None:
        try:
            while self._part:
                number, _, data = self._queue.get()
                at, view = 0, memoryview(data)
                for which, offset, length in manifest.chunks[number]:
                    if which not in self._skip:
                        self._write(manifest.files[which], offset, view[at : at + length])
                    at += length
                with self._changed:
                    self._lacking.discard(number)
                    del self._held[number]
                    self._changed.notify_all()
        except OSError as error:
            if self._part:
                self.fail(f"{self._home}: {error.strerror}")

    def _write(self, file: File, offset: int, data: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        path, mode, mtime, size, _ = file
        fd = os.open(path, flags, 0o600, dir_fd=self._root)
        try:
            while data:
                wrote = os.pwrite(fd, data, offset)
                data, offset = data[wrote:], offset + wrote
            if size <= CHUNK:
                os.fchmod(fd, mode)
                os.utime(fd, ns=(mtime, mtime))
        finally:
            os.close(fd)

    def _complete(self) -> None:
        """Make the tree whole by one rename."""
        manifest, root = self._manifest, os.path.join(self._part, "root")
        assert manifest
        for path, mode, mtime, size, _ in manifest.files:
            if size > CHUNK:
                os.chmod(f"{root}/{path}", mode)
                os.utime(f"{root}/{path}", ns=(mtime, mtime))
        for folder, mode, _, links in manifest.folders:
            for name, target in links:
                os.symlink(target, os.path.join(root, folder, name))
            os.chmod(os.path.join(root, folder), mode | 0o700)
        os.mkdir(os.path.join(self._part, ".ezpz"))
        sums = packed([self._sums[number] for number in range(len(manifest.chunks))])
        for name, data in (("manifest", manifest.data), ("checksums", sums)):
            with open(os.path.join(self._part, ".ezpz", name), "wb") as out:
                out.write(data)
        if os.path.isdir(self._tree) and whole_tree(self._tree) is None:
            _remove(self._tree)
        try:
            os.rename(self._part, self._tree)
        except OSError:
            # Another launch was quicker; what it made is the same.
            if not os.path.isfile(os.path.join(self._tree, ".ezpz", "manifest")):
                raise
            self._open(self._tree)
            shutil.rmtree(self._part, ignore_errors=True)
        self._part = ""


def _sums_of_files(manifest: Manifest, sums: Sequence[bytes]) -> Iterator[tuple[File, list[bytes]]]:
    """Return each file of a whole tree with the checksums of its pieces."""
    of_file = [list[bytes]() for _ in manifest.files]
    for pieces, theirs in zip(manifest.chunks, sums, strict=True):
        for at, (which, _, _) in enumerate(pieces):
            of_file[which].append(theirs[_DIGEST * at : _DIGEST * (at + 1)])
    return zip(manifest.files, of_file, strict=True)


# The program.


def main() -> int:
    """Do what ezpz-launch says until it says farewell."""
    gc.disable()  # it would look at the manifest's tuples again and again: half the time to read it
    where, secret = os.environ[VARIABLE].rsplit(" ", 1)
    connection = connect(where.split(), _WAIT)
    if connection is None:
        print(f"ezpz-launch: {os.uname().nodename} does not reach {where}", file=sys.stderr)
        return 1
    control, node = RankSettings(connection, secret, int(os.environ["RANK"])), None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        while (words := hear(control.file)) != ["bye"]:
            try:
                node = _obey(control, node, *words)
            except (NodeError, OSError) as error:
                control.tell("failed", str(error))
    except OSError:
        return 1  # ezpz-launch is gone
    finally:
        if node:
            node.remove()
    return 0


def _obey(control: RankSettings, node: Node | None, what: str, *words: Any) -> Node | None:
    """Follow an order; return the node that is staged to, if there is one now."""
    if what == "from" and node:
        node.leave()
        threading.Thread(target=node.fetch, args=words, daemon=True).start()
        return node
    home = own_folder(sys.argv[1])
    if what != "stage":
        removed = clean(home, lambda _: True) if what == "clean" else []
        used, now = in_use(home), time.time()
        held = [
            {"name": name, "about": found[0].about, "size": sum(file[3] for file in found[0].files),
             "age": now - when, "used": name in used}
            for when, name in trees(home) if (found := read_tree(os.path.join(home, name)))
        ]  # fmt: skip
        control.tell("status", held, removed)
        return None
    name, every = words
    clean(home, lambda age: age > _OLD, kept=name)
    node = Node(home, name, every, control)
    # Children reach us where ezpz-launch does.
    server = socket.create_server(
        (control.connection.getsockname()[0], 0), family=control.connection.family,
        backlog=socket.SOMAXCONN,
    )  # fmt: skip
    serving = (server, control.secret, partial(map, node.read))
    threading.Thread(target=serve, args=serving, daemon=True).start()
    control.tell("at", server.getsockname()[1], node.is_whole)
    return node


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads may still answer
