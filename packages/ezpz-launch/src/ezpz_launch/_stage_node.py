"""Program: one node's part in staging: it fetches what is staged, unpacks it, and hands it on.

ezpz-launch starts it once on each node: ``python -I -S _stage_node.py FOLDER``, with ``EZPZ_STAGE``
(where ezpz-launch listens, and a secret). It needs the standard library alone, and few files of it.

A tree is staged in chunks. Each node asks its parent, another node, for the chunks that it lacks,
and answers its own children: from memory what has just come, from its disk what is older. So a
parent that dies can be replaced by any other node, and a node that has a file already needs none.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from _queue import SimpleQueue
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from ._agent import _connect, is_proof, proof
else:  # the program
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from _agent import _connect, is_proof, proof

    del sys.path[0]

VARIABLE = "EZPZ_STAGE"

CHUNK = 4 << 20
"""Bytes of a chunk, at most: a node hands a chunk on when it has all of it."""

_PIECES = 512  # files of a chunk, at most
_DIGEST = 16  # bytes of a piece's checksum
_HELD = 16  # chunks that are kept in memory for children, though they are on the disk
_UNWRITTEN = 32  # chunks that wait for the disk, before no more are fetched
_TRIES = 3  # times that a chunk is asked for whose checksum is wrong
_SLACK = 64 << 20  # bytes of the disk that are left free
_BLOCK = 4096  # bytes that a file takes in multiples of
_WAIT = 60  # seconds for another node to prove who it is
_YOUNG = 600.0  # seconds after its last use for which a tree is never removed
_OLD = 7 * 86400.0  # seconds after its last use from which it always is

_MANIFEST = -1  # the number of the chunk that is the manifest
_HEADER = struct.Struct(">iII")


class NodeError(Exception):
    """What this node cannot do; its text is told ezpz-launch, which names the node."""


# What is staged: a manifest, and the chunks that follow from it.


File = tuple[str, int, int, int, str]
"""Path below the tree's root (the original's without its first slash), mode, mtime in ns (Python
compares it with what a .pyc says), size, and a key that no other version has; an empty key is of a
file that no other tree has."""

Piece = tuple[int, int, int]
"""A part of a chunk: the file's number, where in it, how many bytes."""


class Manifest:
    """What a tree holds; ``to_bytes`` is what is sent, and kept in it."""

    def __init__(
        self, files: Sequence[File], folders: Sequence[tuple[str, int]],
        links: Sequence[tuple[str, str]], about: str = "",
    ) -> None:  # fmt: skip
        self.files, self.folders, self.links, self.about = files, folders, links, about
        self._chunks: list[list[Piece]] = []
        self._data = b""

    @classmethod
    def of(cls, data: bytes | bytearray) -> Manifest:
        """Read one; ValueError: it is none. Marshal takes a tenth of the time of JSON."""
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            raise ValueError("damaged")
        manifest = cls(*marshal.loads(data[32:]))  # noqa: S302 - checked, and written by us
        manifest._data = bytes(data)
        return manifest

    def to_bytes(self) -> bytes:
        """Return the bytes it came as: what marshal writes is not the same each time."""
        if not self._data:
            parts: Any = self.files, self.folders, self.links, self.about
            body = marshal.dumps(parts)
            self._data = hashlib.sha256(body).digest() + body
        return self._data

    @property
    def size(self) -> int:
        return sum(file[3] for file in self.files)

    @property
    def chunks(self) -> list[list[Piece]]:
        self._chunks = self._chunks or list(_chunks(self.files))
        return self._chunks

    def size_of(self, number: int) -> int:
        return sum(length for _, _, length in self.chunks[number])


def _chunks(files: Sequence[File]) -> Iterator[list[Piece]]:
    chunk, size = list[Piece](), 0
    for number, file in enumerate(files):
        # A file is cut at multiples of CHUNK, whatever comes before it: checksums stay true.
        for offset in range(0, max(file[3], 1), CHUNK):
            length = min(CHUNK, file[3] - offset)
            if chunk and (size + length > CHUNK or len(chunk) == _PIECES):
                yield chunk
                chunk, size = [], 0
            chunk.append((number, offset, length))
            size += length
    if chunk:
        yield chunk


def checksums(pieces: Sequence[Piece], data: memoryview) -> bytes:
    """Return a chunk's, one after the other: made where a file is read, checked at its end."""
    found, at = [], 0
    for _, _, length in pieces:
        found.append(hashlib.sha256(data[at : at + length]).digest()[:_DIGEST])
        at += length
    return b"".join(found)


def split(manifest: Manifest, sums: bytes) -> Iterator[bytes]:
    """Return the checksums of each chunk of a whole tree's."""
    at = 0
    for pieces in manifest.chunks:
        yield sums[at : at + _DIGEST * len(pieces)]
        at += _DIGEST * len(pieces)


# Connections, between nodes and to ezpz-launch: each side shows that it knows the secret.


def say(connection: socket.socket, *words: object) -> None:
    connection.sendall(json.dumps(words).encode() + b"\n")


def hear(connection: socket.socket) -> list[Any]:
    """Return the next line; OSError: there is none. Only what has been asked for comes after it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1) if len(line) < 4096 else b""
        if not byte:
            raise ConnectionError("closed")
        line += byte
    words = json.loads(line)
    if not isinstance(words, list) or not words:
        raise ConnectionError("no words")
    return words


def introduce(connection: socket.socket, secret: str, node: int) -> None:
    """Prove to who accepted a connection that we are a node of this launch; see that it is, too."""
    _, challenge = hear(connection)
    own = os.urandom(16).hex()
    say(connection, "hello", node, own, proof(secret, node, "child", challenge, own))
    word, shown = hear(connection)
    if word != "welcome" or not is_proof(shown.encode(), secret, node, "parent", own, challenge):
        raise ConnectionError("no node of this launch")


def is_introduced(words: list[Any], secret: str, challenge: str) -> str:
    """Return our answer to a ``hello``; empty where it proves nothing."""
    if len(words) != 4 or words[0] != "hello" or not isinstance(words[1], int):
        return ""
    node, own, shown = words[1], str(words[2]), str(words[3])
    if not is_proof(shown.encode(errors="replace"), secret, node, "child", challenge, own):
        return ""
    return proof(secret, node, "parent", own, challenge)


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = connection.recv_into(view[at:])
        if not got:
            raise ConnectionError("closed")
        at += got
    return data


# What chunks are answered from, and who answers.


class Store:
    """The chunks that there are: of those that come, a few in memory, the others on the disk."""

    def __init__(self, read: Callable[[int], tuple[bytes, bytes | bytearray]]) -> None:
        self._read = read
        self._changed = threading.Condition()
        self._held: dict[int, tuple[bytes, bytes | bytearray]] = {}
        self._written: set[int] = set()
        self._failed = self._all = False

    def fail(self) -> None:
        """Let no one wait here: no more chunks will come."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def get(self, number: int) -> tuple[bytes, bytes | bytearray]:
        """Return a chunk's checksums and bytes; wait until there are any."""
        with self._changed:
            while not (self._all or number in self._written or number in self._held):
                self._wait()
            if number in self._held:
                return self._held[number]
        return self._read(number)

    def _wait(self) -> None:
        if self._failed:
            raise ConnectionError("this node has failed")
        self._changed.wait()

    def put(self, number: int, sums: bytes, data: bytes | bytearray) -> None:
        with self._changed:
            while len(self._held.keys() - self._written) >= _UNWRITTEN:
                self._wait()
            self._held[number] = sums, data
            self._changed.notify_all()

    def wrote_all(self) -> None:
        with self._changed:
            self._all = True
            self._changed.notify_all()

    def wrote(self, *numbers: int) -> None:
        with self._changed:
            self._written.update(numbers)
            for number in [n for n in self._held if n in self._written][:-_HELD]:
                del self._held[number]
            self._changed.notify_all()


def serve(
    server: socket.socket, secret: str, get: Callable[[int], tuple[bytes, bytes | bytearray]],
    wanted: Callable[[list[int]], None] = lambda _: None,
) -> None:  # fmt: skip
    """Answer every child that connects, each in threads of its own, until the server is closed."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        words = (connection, secret, get, wanted)
        threading.Thread(target=_serve_child, args=words, daemon=True).start()


def _serve_child(
    connection: socket.socket, secret: str, get: Callable[[int], tuple[bytes, bytes | bytearray]],
    wanted: Callable[[list[int]], None],
) -> None:  # fmt: skip
    queue: SimpleQueue[int | None] = SimpleQueue()
    with connection, contextlib.suppress(OSError, ValueError):
        connection.settimeout(_WAIT)
        challenge = os.urandom(16).hex()
        say(connection, "challenge", challenge)
        answer = is_introduced(hear(connection), secret, challenge)
        if not answer:
            return
        say(connection, "welcome", answer)
        connection.settimeout(None)
        threading.Thread(target=_send, args=(connection, queue, get), daemon=True).start()
        while True:
            (count,) = struct.unpack(">I", _receive(connection, 4))
            numbers = list(struct.unpack(f">{count}i", _receive(connection, 4 * count)))
            wanted(numbers)
            for number in numbers:
                queue.put(number)
    queue.put(None)


def _send(
    connection: socket.socket, queue: SimpleQueue[int | None],
    get: Callable[[int], tuple[bytes, bytes | bytearray]],
) -> None:  # fmt: skip
    with contextlib.suppress(OSError):
        while (number := queue.get()) is not None:
            sums, data = get(number)
            connection.sendall(_HEADER.pack(number, len(sums), len(data)))
            connection.sendall(sums)
            connection.sendall(data)
        return
    with contextlib.suppress(OSError):  # the child asks another one
        connection.shutdown(socket.SHUT_RDWR)


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
            "name another: ezpz stage --to, local_disk of the machine's file, or TMPDIR"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        what = f"of user {found.st_uid}" if stat.S_ISDIR(found.st_mode) else "no folder"
        raise NodeError(f"{path} is {what}; expected a folder of this user's own; remove it")
    if found.st_mode & 0o077:
        os.chmod(path, 0o700)
    return path


def manifest_of(tree: str) -> tuple[Manifest, bytes] | None:
    """Return what a tree holds, and its checksums; None where it is not whole, or damaged."""
    try:
        with open(os.path.join(tree, ".ezpz", "manifest"), "rb") as file:
            manifest = Manifest.of(file.read())
        with open(os.path.join(tree, ".ezpz", "checksums"), "rb") as file:
            return manifest, file.read()
    except (OSError, ValueError, TypeError, EOFError):
        return None


def intact(root: str, files: Sequence[File]) -> Iterator[bool]:
    """Tell of each file whether it is as it was written: what cleans /tmp removes single ones."""
    for path, _, mtime, size, _ in files:
        try:
            found = os.lstat(f"{root}/{path}")
        except OSError:
            yield False
        else:
            same = found.st_size == size and found.st_mtime_ns == mtime
            yield same and stat.S_ISREG(found.st_mode)


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
    mark, names = f"EZPZ_STAGED={home}/".encode(), set[str]()
    for pid in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if pid.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                _, found, rest = file.read().partition(mark)
                if found:
                    names.add(os.fsdecode(rest[:16]))
    return names


def clean(home: str, kept: str = "", room: Callable[[], bool] = lambda: True) -> list[str]:
    """Remove what is old or a crash has left and, until there is room, what is not used now."""
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
        age = time.time() - when
        if name not in used and age > _YOUNG and (age > _OLD or not room()):
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


class Node:
    def __init__(
        self, home: str, name: str, tell: Callable[..., None], secret: str, me: int
    ) -> None:
        self._home, self._name, self._tell = home, name, tell
        self._secret, self._me = secret, me
        self._tree = os.path.join(home, name)
        self._part, self._lock, self._root = "", -1, -1
        self._manifest: Manifest | None = None
        self._sums: dict[int, bytes] = {}
        self._all_sums = b""
        self._missing: set[int] = set()  # chunks that are not on the disk yet
        self._skip: set[int] = set()  # files that an older tree had
        self._fetched: set[int] = set()
        self._queue: SimpleQueue[tuple[int, bytes | bytearray]] = SimpleQueue()
        self._done, self._turn = threading.Lock(), threading.Lock()
        self._parent: socket.socket | None = None
        self.store = Store(self._read)
        self.bytes = 0
        self.is_whole = self._is_here()

    def _is_here(self) -> bool:
        found = manifest_of(self._tree)
        if found is None or not all(intact(f"{self._tree}/root", found[0].files)):
            return False
        os.utime(os.path.join(self._tree, ".ezpz"))
        self._open(self._tree)
        self._take(found[0], found[1])
        return True

    def _open(self, tree: str) -> None:
        self._root = os.open(os.path.join(tree, "root"), os.O_RDONLY | os.O_DIRECTORY)

    def _take(self, manifest: Manifest, sums: bytes) -> None:
        """Be ready to answer every chunk of a tree that is whole."""
        self._manifest, self._all_sums = manifest, sums
        self.store.wrote_all()

    def _sums_of(self, number: int) -> bytes:
        if self._manifest and self._all_sums and not self._sums:
            self._sums = dict(enumerate(split(self._manifest, self._all_sums)))
        return self._sums[number]

    def _read(self, number: int) -> tuple[bytes, bytes | bytearray]:
        """Return a chunk that is on the disk."""
        manifest = self._manifest
        assert manifest
        if number == _MANIFEST:
            return b"", manifest.to_bytes()
        parts = []
        for which, offset, length in manifest.chunks[number]:
            fd = os.open(manifest.files[which][0], os.O_RDONLY, dir_fd=self._root)
            try:
                parts.append(os.pread(fd, length, offset))
            finally:
                os.close(fd)
        return self._sums_of(number), b"".join(parts)

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
            else:
                self._finish()

    def _fetch_from(self, address: str, parent: int, digest: str) -> None:
        with self._connected(address) as connection:
            introduce(connection, self._secret, self._me)
            if self._manifest is None:
                self._prepare(connection, digest)
            self._fetch(connection, parent)

    def _connected(self, address: str) -> socket.socket:
        connection = _connect([address], _WAIT)
        if connection is None:
            raise ConnectionError("it does not answer")
        self._parent = connection
        return connection

    def leave(self) -> None:
        """Wait for no more of the present parent."""
        if self._parent is not None:
            with contextlib.suppress(OSError):
                self._parent.shutdown(socket.SHUT_RDWR)

    def fail(self, why: str) -> None:
        self._tell("failed", why)
        self.store.fail()
        self.remove()

    def _prepare(self, connection: socket.socket, digest: str) -> None:
        """Get the manifest, link what older trees have, see that there is room; start writing."""
        connection.sendall(struct.pack(">Ii", 1, _MANIFEST))
        number, _, size = _HEADER.unpack(_receive(connection, _HEADER.size))
        data = _receive(connection, size)
        if number != _MANIFEST or hashlib.sha256(data).hexdigest() != digest:
            raise ConnectionError("its list of what is staged is not the launch's")
        manifest = Manifest.of(data)
        try:
            self._make(manifest)
        except OSError as error:
            raise NodeError(f"{self._home}: {error.strerror}") from error
        self._manifest = manifest
        for _ in range(min(8, max(2, (os.cpu_count() or 2) // 4))):
            threading.Thread(target=self._write_all, daemon=True).start()
        self.store.wrote(_MANIFEST, *(n for n in self._sums if n not in self._missing))

    def _make(self, manifest: Manifest) -> None:
        self._part = f"{self._tree}.part-{os.urandom(4).hex()}"
        os.mkdir(self._part, 0o700)
        self._lock = os.open(self._part, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        root = os.path.join(self._part, "root")
        os.mkdir(root, 0o700)
        self._open(self._part)
        for path, _ in manifest.folders:
            os.makedirs(path and os.path.join(root, path), 0o700, exist_ok=True)
        known = self._link(manifest, root)
        needed = 0
        for number, pieces in enumerate(manifest.chunks):
            lacking = [piece for piece in pieces if piece[0] not in self._skip]
            if lacking:
                self._missing.add(number)
                needed += sum(-(-length // _BLOCK) * _BLOCK for _, _, length in lacking)
            else:
                self._sums[number] = b"".join(
                    known[which][offset // CHUNK] for which, offset, _ in pieces
                )
        self._require_room(needed, len(manifest.files) - len(self._skip))

    def _link(self, manifest: Manifest, root: str) -> dict[int, list[bytes]]:
        """Link the files that whole trees here have; return their checksums, by pieces."""
        wanted = {file: number for number, file in enumerate(manifest.files) if file[4]}
        known: dict[int, list[bytes]] = {}
        for _, name in reversed(trees(self._home)):
            tree = os.path.join(self._home, name)
            found = manifest_of(tree) if len(known) < len(wanted) else None
            if found is None:
                continue
            old, sums = found
            of_file: dict[int, list[bytes]] = {}
            for pieces, theirs in zip(old.chunks, split(old, sums), strict=True):
                for at, (which, _, _) in enumerate(pieces):
                    of_file.setdefault(which, []).append(theirs[_DIGEST * at : _DIGEST * (at + 1)])
            same = [(n, old_n) for old_n, file in enumerate(old.files)
                    if (n := wanted.get(file, -1)) >= 0 and n not in known]  # fmt: skip
            kept = intact(f"{tree}/root", [manifest.files[n] for n, _ in same])
            for (number, old_number), is_intact in zip(same, kept, strict=True):
                path = manifest.files[number][0]
                # A disk without links, or with too many of one file: it is fetched.
                with contextlib.suppress(OSError):
                    if is_intact:
                        os.link(f"{tree}/root/{path}", f"{root}/{path}")
                        known[number] = of_file[old_number]
        self._skip = set(known)
        return known

    def _require_room(self, needed: int, files: int) -> None:
        def room() -> bool:
            disk = os.statvfs(self._home)
            enough = disk.f_bavail * disk.f_frsize >= needed + _SLACK
            return enough and (not disk.f_files or disk.f_favail >= files)

        if not room():
            clean(self._home, self._name, room)
        if not room():
            disk = os.statvfs(self._home)
            raise NodeError(
                f"{self._home} has {disk.f_bavail * disk.f_frsize / 1e6:,.0f} MB free; expected "
                f"{(needed + _SLACK) / 1e6:,.0f} MB for {files:,} files; make room (ezpz stage "
                "--clean), or name another disk: ezpz stage --to, TMPDIR"
            )

    def _fetch(self, connection: socket.socket, parent: int) -> None:
        manifest = self._manifest
        assert manifest
        numbers = sorted(self._missing - self._fetched)
        connection.sendall(struct.pack(f">I{len(numbers)}i", len(numbers), *numbers))
        left, tries = len(numbers), dict[int, int]()
        while left:
            number, length, size = _HEADER.unpack(_receive(connection, _HEADER.size))
            if not 0 <= number < len(manifest.chunks) or size != manifest.size_of(number):
                raise ConnectionError("what it sends is not what was asked for")
            sums, data = bytes(_receive(connection, length)), _receive(connection, size)
            if checksums(manifest.chunks[number], memoryview(data)) != sums:
                tries[number] = tries.get(number, 0) + 1
                if tries[number] == _TRIES:
                    self._tell("corrupt", parent, f"chunk {number} came {_TRIES} times damaged")
                    raise ConnectionError("what it sends is damaged")
                connection.sendall(struct.pack(">Ii", 1, number))
                continue
            left -= 1
            self._sums[number] = sums
            self._fetched.add(number)
            self.bytes += size
            self.store.put(number, sums, data)
            self._queue.put((number, data))

    def _write_all(self) -> None:
        manifest = self._manifest
        assert manifest
        try:
            while self._part:
                number, data = self._queue.get()
                at = 0
                view = memoryview(data)
                for which, offset, length in manifest.chunks[number]:
                    if which not in self._skip:
                        self._write(manifest.files[which], offset, view[at : at + length])
                    at += length
                self.store.wrote(number)
                with self._done:
                    self._missing.discard(number)
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

    def _finish(self) -> None:
        """When all is written, make it whole by one rename."""
        if self.is_whole:
            return
        while self._missing:
            if not self._part:
                return  # it has failed
            time.sleep(0.002)
        manifest = self._manifest
        assert manifest
        try:
            self._complete(manifest)
        except OSError as error:
            self.fail(f"{self._home}: {error.strerror}")
            return
        self.is_whole = True
        self._tell("whole", self.bytes)

    def _complete(self, manifest: Manifest) -> None:
        root = os.path.join(self._part, "root")
        for path, mode, mtime, size, _ in manifest.files:
            if size > CHUNK:
                os.chmod(f"{root}/{path}", mode)
                os.utime(f"{root}/{path}", ns=(mtime, mtime))
        for path, target in manifest.links:
            os.symlink(target, f"{root}/{path}")
        for path, mode in manifest.folders:
            os.chmod(f"{root}/{path}", mode | 0o700)
        os.mkdir(os.path.join(self._part, ".ezpz"))
        sums = b"".join(self._sums[number] for number in range(len(manifest.chunks)))
        for name, data in (("manifest", manifest.to_bytes()), ("checksums", sums)):
            with open(os.path.join(self._part, ".ezpz", name), "wb") as out:
                out.write(data)
        if os.path.isdir(self._tree):
            found = manifest_of(self._tree)
            if found is None or not all(intact(f"{self._tree}/root", found[0].files)):
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

    def remove(self) -> None:
        """Remove what is not whole."""
        part, self._part = self._part, ""
        if part:
            shutil.rmtree(part, ignore_errors=True)


def _status(home: str) -> list[dict[str, object]]:
    used, now = in_use(home), time.time()
    rows = []
    for when, name in trees(home):
        found = manifest_of(os.path.join(home, name))
        if found:
            about, size = found[0].about, found[0].size
            rows.append({"name": name, "about": about, "size": size, "age": now - when,
                         "used": name in used})  # fmt: skip
    return rows


class _Session:
    """What ezpz-launch says on one connection, and what this node does about it."""

    def __init__(self, control: socket.socket, secret: str, me: int, folder: str) -> None:
        self._control, self._secret, self._me, self._folder = control, secret, me, folder
        self._speaks = threading.Lock()
        self.node: Node | None = None

    def tell(self, *words: object) -> None:
        with self._speaks, contextlib.suppress(OSError):
            say(self._control, *words)

    def obey(self, what: str, words: list[Any]) -> None:
        try:
            if what in ("status", "clean"):
                home = own_folder(self._folder)
                removed = _clean_all(home) if what == "clean" else []
                self.tell("status", _status(home), removed)
            elif what == "stage":
                self._stage(*words)
            elif what == "from" and self.node:
                self.node.leave()
                threading.Thread(target=self.node.fetch, args=words, daemon=True).start()
        except (NodeError, OSError) as error:
            self.tell("failed", str(error))

    def _stage(self, name: str, every: float) -> None:
        home = own_folder(self._folder)
        clean(home, name)
        node = self.node = Node(home, name, self.tell, self._secret, self._me)
        server = socket.socket(self._control.family)
        server.bind((self._control.getsockname()[0], 0))
        server.listen(socket.SOMAXCONN)
        serving = (server, self._secret, node.store.get)
        threading.Thread(target=serve, args=serving, daemon=True).start()
        threading.Thread(target=_report, args=(node, self.tell, every), daemon=True).start()
        self.tell("at", server.getsockname()[1], node.is_whole)


def main() -> int:
    """Do what ezpz-launch says until it says farewell."""
    where, secret = os.environ[VARIABLE].rsplit(" ", 1)
    control = _connect(where.split(), _WAIT)
    if control is None:
        print(f"ezpz-launch: {os.uname().nodename} does not reach {where}", file=sys.stderr)
        return 1
    me = int(os.environ["RANK"])
    introduce(control, secret, me)
    session = _Session(control, secret, me, sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        while True:
            what, *words = hear(control)
            if what == "bye":
                return 0
            session.obey(what, words)
    except OSError:
        return 1  # ezpz-launch is gone
    finally:
        if session.node:
            session.node.remove()


def _clean_all(home: str) -> list[str]:
    removed = clean(home)
    for _, name in trees(home):
        if name not in in_use(home):
            removed.append(name)
            _remove(os.path.join(home, name))
    return removed


def _report(node: Node, tell: Callable[..., None], every: float) -> None:
    told = 0
    while not node.is_whole:
        if node.bytes != told:
            told = node.bytes
            tell("got", told)
        time.sleep(every)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads may still answer
