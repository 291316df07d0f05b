"""Real ranks that have ezpz_dist loaded; and listeners that are no store."""

import contextlib
import socket
import struct
import threading

import pytest
from forked_ranks import clean_env, fork_server, programs, ranks, user_env

PRELUDE = """
import torch.distributed as dist, ezpz_dist
from ezpz_dist import *
def raises(kind, words, call, *args, **options):
    try:
        call(*args, **options)
    except kind as error:
        assert words in str(error), (words, error)
        return error
    raise AssertionError(f"not raised: {words}")
sys.modules["builtins"].raises = raises  # for programs, too
"""
"""Every script begins so; ``raises`` returns the error that a call raises with these words."""


@pytest.fixture(scope="session")
def prelude():
    return PRELUDE


@pytest.fixture(scope="session")
def preloaded():
    return [
        "ezpz_dist",
        # What some tests import on each rank, for seconds.
        "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
        "torch.distributed.optim", "torch.distributed.tensor",
    ]  # fmt: skip


SAYS = {"http": b"HTTP/1.1 400 Bad Request\r\n\r\n", "ssh": b"SSH-2.0-OpenSSH_9.6\r\n"}


@pytest.fixture
def listener():
    """Listen as a foreign program does, that is no store, and return the port."""
    listening, accepted = [], []

    def serve(server, kind):
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            if kind == "silent":
                accepted.append(connection)
                continue
            with connection, contextlib.suppress(OSError):  # who asked may have gone
                if kind == "http":
                    connection.recv(1000)
                connection.sendall(SAYS.get(kind, b""))
                if kind == "resets":
                    gone = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, gone)

    def listen(kind):
        server = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=serve, args=(server, kind), daemon=True)
        thread.start()
        listening.append((server, thread))
        return server.getsockname()[1]

    yield listen
    for server, thread in listening:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()
    for connection in accepted:
        connection.close()
