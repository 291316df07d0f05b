"""The connection between ezpz-launch and a node's agent: messages, and who may send them.

A message is a JSON object behind its length (four bytes, big endian). Whoever connects is
challenged: each side shows that it knows the launch's secret, by an HMAC of the other's challenge.

The node programs import this module without site packages, so it needs the standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 1 << 24
"""Of a message, such as all stacks of one node."""

MAX_STRANGER_BYTES = 4096
"""Of a message of someone who has not yet proved who it is."""

_LENGTH = struct.Struct(">I")


class ProtocolError(Exception):
    """The other side sent something that is not a message of this protocol."""


def encode(message: Message) -> bytes:
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


class Decoder:
    """Takes messages out of a stream of bytes."""

    def __init__(self, max_bytes: int = MAX_STRANGER_BYTES) -> None:
        self.max_bytes = max_bytes
        self._received = b""

    def feed(self, data: bytes) -> None:
        self._received += data

    def next_message(self) -> Message | None:
        """Return the next whole message, or None if more bytes are needed.

        Raises:
            ProtocolError: What was received is too long, or is not a JSON object.
        """
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > self.max_bytes:
            raise ProtocolError(f"a message of {length} bytes; expected at most {self.max_bytes}")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        data = self._received[_LENGTH.size : end]
        self._received = self._received[end:]
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"a message that is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise ProtocolError(f"a {type(message).__name__}; expected a JSON object")
        return message


def new_challenge() -> str:
    return os.urandom(16).hex()


def sign(secret: str, node: int, role: str, *challenges: str) -> str:
    """Return the HMAC by which one side (``agent`` or ``launch``) answers the challenges."""
    import hmac  # noqa: PLC0415  # a launch on one host needs none, and starts sooner

    text = " ".join([role, str(node), *challenges])
    return hmac.digest(secret.encode(), text.encode(), "sha256").hex()


def is_signed(signature: object, secret: str, node: int, role: str, *challenges: str) -> bool:
    """True if the signature is the one that `sign` makes."""
    import hmac  # noqa: PLC0415  # as above

    if not isinstance(signature, str):
        return False
    expected = sign(secret, node, role, *challenges)
    return hmac.compare_digest(signature.encode(), expected.encode())


def keep_alive(connection: socket.socket, timeout: int) -> None:
    """Have the kernel close a connection whose other host has not answered for these seconds."""
    interval = max(1, timeout // 7)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": interval,
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": timeout // interval - 1,
        # In milliseconds: for data that was sent and is not acknowledged.
        "TCP_USER_TIMEOUT": 1000 * (timeout - interval),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
