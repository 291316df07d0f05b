"""The folder of the records, in the user's state folder; it need not exist."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping

from ezpz_launch._errors import LaunchError


def records_folder(env: Mapping[str, str]) -> str:
    """Return the folder of the records, which need not exist.

    It is ``launches`` in ``EZPZ_STATE_DIR``, else in the user's state folder for ezpz.

    Raises:
        LaunchError: This user has no home.
    """
    given = env.get("EZPZ_STATE_DIR")
    return os.path.join(os.path.abspath(given) if given else _state_folder(env), "launches")


def _state_folder(env: Mapping[str, str]) -> str:
    base = env.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        if sys.platform != "linux":
            from platformdirs import user_state_path  # noqa: PLC0415  # 9 ms

            return str(user_state_path("ezpz"))
        # What platformdirs says as well, without its 9 ms; a test holds us to it.
        base = os.path.join(env.get("HOME") or _home(), ".local", "state")
    if not os.path.isabs(base):
        # Never into the working directory.
        raise LaunchError(
            f"HOME={env.get('HOME', '')!r}; expected the home directory of this user; set HOME, "
            "or EZPZ_STATE_DIR to a folder for ezpz's records"
        )
    return os.path.join(base, "ezpz")


def _home() -> str:
    import pwd  # noqa: PLC0415

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def make_folder(folder: str) -> None:
    """Make it and what is above it, for this user only."""
    try:
        os.mkdir(folder, 0o700)
    except FileNotFoundError:
        make_folder(os.path.dirname(folder))
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise


def write_whole(path: str, data: bytes) -> None:
    """Write a file that readers see as it was or as it is, never half."""
    aside = f"{path}.new"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(aside, path)
    except OSError:
        remove(aside)
        raise


def remove(path: str) -> None:
    """Remove a file, if it can be."""
    # It is not there, or stays until it is pruned.
    with contextlib.suppress(OSError):
        os.unlink(path)


def why_no_folder(folder: str, error: OSError) -> str:
    """Say that the folder cannot be written, and what helps."""
    return (
        f"{folder} cannot be written ({error.strerror or error}); expected a folder of this user; "
        "set EZPZ_STATE_DIR to another"
    )
