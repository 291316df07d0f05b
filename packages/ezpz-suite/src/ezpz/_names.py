"""Public names that are imported when they are first used."""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def attach(module: str) -> "tuple[Callable[[str], object], Callable[[], list[str]]]":
    """Return a module's ``__getattr__`` and ``__dir__``, which also give its ``__all__``.

    Its names are those that its source imports for type checkers, each on a line of its own:
    ``from .home import name as name``. The source is read when a name is first looked up.
    """
    homes: dict[str, str] = {}

    def names() -> dict[str, str]:
        if not homes:
            spec = sys.modules[module].__spec__
            source = spec.loader.get_source(module)  # type: ignore[union-attr]  # it has a source
            lines = (line.split() for line in source.splitlines())
            homes.update(
                {words[3]: words[1] for words in lines if words[:5:2] == ["from", "import", "as"]}
            )
        return homes

    def get(name: str) -> object:
        from importlib import import_module  # noqa: PLC0415  # importing ezpz loads nothing

        if name == "__all__":
            return sorted(names())
        home = names().get(name)
        if home is None:
            raise unknown(module, name, homes)
        if home == ".":
            return import_module(f"{module}.{name}")
        value: object = getattr(import_module(home, module), name)
        setattr(sys.modules[module], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[module]), *names()})


def unknown(module: str, name: str, known: "Iterable[str]") -> AttributeError:
    """Return the error for a name that a module has not, with the one that was meant."""
    import difflib  # noqa: PLC0415  # only a mistake needs it

    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
