"""Our own options as a `Request`, by Fire where there is something for it to parse."""

from __future__ import annotations

from ._argv import Options
from ._errors import UsageError
from ._request import Request

_PARSED = ("nproc", "ppn", "nodes", "dry-run", "json")
_TEXTS = ("hostfile", "include", "exclude", "launcher", "machine", "cpu-bind")
_FLAGS = {"nproc": "-n", "ppn": "--ppn", "nodes": "-N"}


def request_of(options: Options, command: tuple[str, ...]) -> Request:
    """Turn our own options into a request; the command is passed by."""
    nproc = str(options.get("nproc", "1"))
    if options.keys() <= {"nproc"} and nproc.isdecimal() and len(nproc) < 10:
        # The common launch. Fire brings asyncio with it: as long as all the rest of the
        # launcher takes to start. A test holds this to what Fire makes of the same words.
        return Request(command, int(nproc) if "nproc" in options else None)
    return _request_by_fire(options, command)


def _request_by_fire(options: Options, command: tuple[str, ...]) -> Request:
    """Let Fire parse our own options, and nothing else."""
    import shlex  # noqa: PLC0415

    import fire  # noqa: PLC0415  # see request_of

    # Text stays text; Fire would make a list of nid[001-004] and a number of 0007.
    texts = {name: value for name, value in options.items() if name not in _PARSED}

    def build(
        nproc: int | None = None,
        ppn: int | None = None,
        nodes: int | None = None,
        dry_run: bool = False,
        json: bool = False,
    ) -> Request:
        for name, value in (("nproc", nproc), ("ppn", ppn), ("nodes", nodes)):
            if name in options and type(value) is not int:
                raise UsageError(f"{_FLAGS[name]} {options[name]}: expected a whole number")
        env = texts.get("env", [])
        try:
            launcher_args = tuple(shlex.split(str(texts.get("launcher-args", ""))))
        except ValueError as error:
            raise UsageError(
                f"--launcher-args {texts['launcher-args']!r}: {error}; expected words quoted as in "
                "a shell"
            ) from error
        return Request(
            command,
            nproc,
            ppn,
            nodes,
            **{key.replace("-", "_"): str(texts[key]) for key in _TEXTS if key in texts},
            env=tuple(env) if isinstance(env, list) else (),
            launcher_args=launcher_args,
            dry_run=dry_run,
            json=json,
        )

    words = [f"--{name}={value}" for name, value in options.items() if name in _PARSED]
    # Fire prints what it returns unless it is serialised to nothing.
    request: Request = fire.Fire(build, command=words, name="ezpz-launch", serialize=_nothing)
    return request


def _nothing(_result: object) -> None:
    return None
