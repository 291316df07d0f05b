"""Our own options as a `Request`, by Fire where there is something for it to parse."""

from __future__ import annotations

from collections.abc import Mapping

from ._argv import Options
from ._errors import UsageError
from ._planning.cores import read_ranges
from ._request import GRACE, Request

_NUMBERS = {"nproc": "-n", "ppn": "--ppn", "nodes": "-N", "retries": "--retries"}
_SWITCHES = ("one-device", "tee", "prefix", "nested", "dry-run", "json")
_UNITS = {"s": 1, "m": 60, "h": 3600}


def request_of(options: Options, command: tuple[str, ...]) -> Request:
    """Turn our own options into a request; the command is passed by.

    Raises:
        UsageError: A value is not what its option takes, or options contradict each other.
    """
    told = {name: str(options[name]) for name in _NUMBERS if name in options}
    if all(map(_is_plain, told.values())):
        # The common launch. Fire brings asyncio with it: as long as all the rest of the
        # launcher takes to start. A test holds this to what Fire makes of the same words.
        numbers = {name: int(text) for name, text in told.items()}
        return _request(options, command, numbers, {name: name in options for name in _SWITCHES})
    return _request_by_fire(options, command)


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and text[0] != "0"


def _request_by_fire(options: Options, command: tuple[str, ...]) -> Request:
    """Let Fire parse our own numbers and switches, and nothing else.

    Text stays text: Fire would make a list of nid[001-004] and a number of 0007.
    """
    import fire  # noqa: PLC0415  # see request_of

    def build(
        *,
        nproc: int | None = None,
        ppn: int | None = None,
        nodes: int | None = None,
        retries: int | None = None,
        one_device: bool = False,
        tee: bool = False,
        prefix: bool = False,
        nested: bool = False,
        dry_run: bool = False,
        json: bool = False,
    ) -> Request:
        numbers: dict[str, int] = {}
        parsed = {"nproc": nproc, "ppn": ppn, "nodes": nodes, "retries": retries}
        for name, value in parsed.items():
            if name in options:
                if type(value) is not int:
                    raise UsageError(f"{_NUMBERS[name]} {options[name]}: expected a whole number")
                numbers[name] = value
        set_to = (one_device, tee, prefix, nested, dry_run, json)
        return _request(options, command, numbers, dict(zip(_SWITCHES, set_to, strict=True)))

    parsed = {*_NUMBERS, *_SWITCHES}
    words = [f"--{name}={value}" for name, value in options.items() if name in parsed]
    # Fire prints what it returns unless it is serialised to nothing.
    request: Request = fire.Fire(build, command=words, name="ezpz-launch", serialize=_nothing)
    return request


def _nothing(_result: object) -> None:
    return None


def _request(
    options: Options,
    command: tuple[str, ...],
    numbers: Mapping[str, int],
    switches: Mapping[str, bool],
) -> Request:
    texts = {name: str(value) for name, value in options.items() if isinstance(value, str)}
    return Request(
        command,
        numbers.get("nproc"),
        numbers.get("ppn"),
        numbers.get("nodes"),
        hostfile=texts.get("hostfile", ""),
        include=texts.get("include", ""),
        exclude=texts.get("exclude", ""),
        launcher=texts.get("launcher", "auto"),
        machine=texts.get("machine", ""),
        cpu_bind=texts.get("cpu-bind", ""),
        log_dir=texts.get("log-dir", ""),
        options=_all_of(options, "option"),
        env=_all_of(options, "env"),
        only_ranks=_ranks(texts["only-ranks"]) if "only-ranks" in texts else None,
        idle_timeout=_seconds(texts, "idle-timeout", 0.0),
        grace=_seconds(texts, "grace", GRACE),
        signal_before=_seconds(texts, "signal-before", 0.0),
        retries=numbers.get("retries", 0),
        launcher_args=_words(texts["launcher-args"]) if "launcher-args" in texts else (),
        one_device=switches["one-device"],
        tee=switches["tee"],
        prefix=switches["prefix"],
        nested=switches["nested"],
        dry_run=switches["dry-run"],
        json=switches["json"],
    )


def _all_of(options: Options, name: str) -> tuple[str, ...]:
    held = options.get(name, [])
    return tuple(held) if isinstance(held, list) else ()


def _seconds(texts: Mapping[str, str], name: str, default: float) -> float:
    """Return a duration in seconds: ``90``, ``1.5``, ``90s``, ``10m`` or ``2h``."""
    if name not in texts:
        return default
    text = texts[name]
    unit = _UNITS.get(text[-1:], 0)
    number = text[:-1] if unit else text
    # Not float() alone, which also takes nan, 1e9 and 1_0.
    if not (number.isascii() and number.replace(".", "", 1).isdigit()):
        raise UsageError(f"--{name} {text!r}: expected a time of 0 or more: 90, 1.5, 90s, 10m, 2h")
    return float(number) * (unit or 1)


def _ranks(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(read_ranges(text, "--only-ranks", "0,4-7"))))


def _words(text: str) -> tuple[str, ...]:
    import shlex  # noqa: PLC0415  # few launches need it

    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(
            f"--launcher-args {text!r}: {error}; expected words quoted as in a shell"
        ) from error
