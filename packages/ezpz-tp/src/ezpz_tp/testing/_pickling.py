"""Send functions to other processes: tests are functions of modules that only pytest can import."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import marshal
import pickle
import sys
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A pickled function and its arguments, and the files of the modules that they are from."""

    pickled: bytes
    files: dict[str, str]
    path: list[str]


def dump_call(function: Any, args: tuple[Any, ...]) -> Call:
    """Pickle a function, also a local one or a lambda, and its arguments."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump((function, args))
    return Call(buffer.getvalue(), pickler.files, sys.path)


def load_call(call: Call) -> Any:
    """Return the function and its arguments."""
    sys.path[:] = call.path
    for name, file in call.files.items():
        if name == "__main__":
            _import_main(file)
        elif name not in sys.modules:
            _import_module(name, file)
    return pickle.loads(call.pickled)  # noqa: S301 - from our own parent


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self.files: dict[str, str] = {}

    def reducer_override(self, value: Any) -> Any:
        if not inspect.isfunction(value) and not inspect.isclass(value):
            return NotImplemented
        module = value.__module__
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is not None:
            self.files[module] = file
        if inspect.isclass(value) or _is_found_by_name(value):
            return NotImplemented
        # Contents of cells are set afterwards: a function may be in one of its own.
        closure = value.__closure__ or ()
        contents = [cell.cell_contents for cell in closure]
        state = (value.__defaults__, value.__kwdefaults__, contents)
        arguments = (marshal.dumps(value.__code__), module, len(closure))
        return (_make_function, arguments, state, None, None, _fill_function)


def _is_found_by_name(function: FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _make_function(code: bytes, module: str, cells: int) -> FunctionType:
    closure = tuple(CellType() for _ in range(cells))
    loaded = marshal.loads(code)  # noqa: S302 - from our own parent
    return FunctionType(loaded, vars(sys.modules[module]), closure=closure)


def _fill_function(function: FunctionType, state: tuple[Any, Any, list[Any]]) -> None:
    function.__defaults__, function.__kwdefaults__, contents = state
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        cell.cell_contents = content


def _import_module(name: str, file: str) -> None:
    """Import a module by its name, or else from its file."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        # The packages of its name may be pytest's invention.
        parent = name.rpartition(".")[0]
        folder = Path(file).parent
        while parent and parent not in sys.modules:
            package = ModuleType(parent)
            package.__path__ = [str(folder)]
            sys.modules[parent] = package
            parent = parent.rpartition(".")[0]
            folder = folder.parent
        _execute(file, name)


def _import_main(file: str) -> None:
    """Import the parent's program, without what it does if it is run."""
    if getattr(sys.modules["__main__"], "__file__", None) != file:
        _execute(file, "__mp_main__", "__main__")


def _execute(file: str, *names: str) -> None:
    """Execute a file as a module of the first of these names."""
    spec = importlib.util.spec_from_file_location(names[0], file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    for name in names:
        sys.modules[name] = module
    spec.loader.exec_module(module)
