"""Go to a port and see whether this job's store is behind it, however odd what answers.

torch's own client does not do: it waits for ever for a listener that says nothing, whatever
its time-out, and twice that for one that closes the connection (torch 2.13).
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]  # torch exports them so
    DistNetworkError,
    TCPStore,
)

from .job import Job

JOB_KEY = "ezpz-job"
"""Where rank 0 writes its job, before anything else."""

# What torch's client sends first: VALIDATE with its magic number, then PING with a number
# that comes back. So from torch 2.3 to 2.13 (TCPStoreBackend.hpp); a test holds it.
_GREETING = b"\x00" + (0x3C85F7CE).to_bytes(4, "little") + b"\x0d"


class NobodyError(Exception):
    """Nothing listens there, or nothing that can be reached."""


class StrangerError(Exception):
    """Something listens there that is not this job's store."""


def visit(
    address: str,
    port: int,
    limit: float,
    timeout: timedelta,
    job: Job | None,
    *,
    patience: float = 0.0,
) -> tuple[TCPStore, Job | None]:
    """Return a client of this job's store, and what rank 0 wrote into it.

    Args:
        address: Numeric.
        port: The port.
        limit: Seconds for each answer that is waited for.
        timeout: The client's own time-out, as torch's client has one.
        job: What the store must be of; None: any store will do, and nothing is read.
        patience: Seconds for rank 0 to write what it is.

    Raises:
        NobodyError: There is no listener.
        StrangerError: It is not this job's store.
    """
    knock(address, port, limit)
    try:
        # Without a world size: torch would sleep up to as many milliseconds as there are ranks.
        store = TCPStore(
            address, port, None, is_master=False, timeout=_time_to_connect(timeout),
            wait_for_workers=False,
        )  # fmt: skip
        store.set_timeout(timeout)
    except DistNetworkError as error:
        raise NobodyError(f"a store of torch that went away ({error})") from error
    if job is None:
        return store, None
    try:
        # Not torch's own wait: where it is in vain it prints a page, and may take seconds for it.
        until = time.monotonic() + patience
        while not (written := store.check([JOB_KEY])) and time.monotonic() < until:
            time.sleep(0.001)
        found = Job.read(store.get(JOB_KEY)) if written else None
    except DistNetworkError as error:
        raise NobodyError(f"a store of torch that went away ({error})") from error
    if found is None:
        raise StrangerError("a store of torch that no ezpz_dist opened")
    difference = found.differs(job)
    if difference:
        raise StrangerError(
            f"the store of another job, by process {found.pid} on {found.host} ({difference})"
        )
    return store, found


def knock(address: str, port: int, limit: float) -> None:
    """Find out whether a store of torch answers.

    Raises:
        NobodyError: There is no listener.
        StrangerError: There is one, but it does not answer as a store of torch does.
    """
    number = os.urandom(4)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as connection:
        connection.settimeout(limit)
        _connect(connection, address, port)
        answer = b""
        try:
            connection.sendall(_GREETING + number)
            while len(answer) < len(number):
                piece = connection.recv(len(number) - len(answer))
                if not piece:
                    raise StrangerError("a listener that closes the connection")
                answer += piece
        except TimeoutError:
            raise StrangerError(f"a listener that says nothing for {limit:.2g} s") from None
        except OSError as error:
            raise StrangerError(f"a listener that breaks off ({error.strerror})") from error
    if answer != number:
        raise StrangerError(f"a listener that is no store of torch (it answers {answer!r})")


def _connect(connection: socket.socket, address: str, port: int) -> None:
    try:
        connection.connect((address, port))
    except TimeoutError:
        raise NobodyError(f"no answer within {connection.gettimeout():.2g} s") from None
    except ConnectionResetError as error:
        # Between the kernel's yes and our next look.
        raise StrangerError(f"a listener that breaks off ({error.strerror})") from error
    except OSError as error:
        raise NobodyError((error.strerror or str(error)).lower()) from error
    if connection.getsockname() == connection.getpeername():
        # The kernel gave us that very port to connect from.
        raise NobodyError("connection refused")


def _time_to_connect(timeout: timedelta) -> timedelta:
    """Return torch's time for a connection, at most half a minute.

    So long it tries again where nobody listens any more. It may need it: it looks up the name of
    the address, only for its messages, and where no name server answers that takes 5 s and more.
    """
    # Less than a second is 0 to it.
    return max(timedelta(seconds=1), min(timeout, timedelta(seconds=30)))
