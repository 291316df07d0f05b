"""A rank's chunks as one module, with the names of the whole model."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ezpz_tp._errors import ParallelError


def joined(modules: Sequence[nn.Module]) -> nn.Module:
    """Return one module of a rank's chunks, in which everything has the name it has in its chunk.

    Raises:
        ParallelError: Two chunks have different parameters or buffers of one name.
    """
    return modules[0] if len(modules) == 1 else Chunks(modules)


class Chunks(nn.ModuleList):
    """Several parts of one model. Its names, and so its state dict, are a part of the model's."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(modules)
        named: dict[str, object] = {}
        for number, module in enumerate(modules):
            kept = module.state_dict(keep_vars=True)
            for name, value in kept.items():
                if named.setdefault(name, value) is not value:
                    raise ParallelError(
                        f"chunk {number} of this rank has another {name} than a chunk before it; "
                        "expected the names of the whole model: number the layers through, as in "
                        "nn.ModuleDict({str(number): ... for number in layers}), and register "
                        "tables with persistent=False"
                    )

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the chunks' modules by the names that they have there."""
        memo = set() if memo is None else memo
        if not remove_duplicate or self not in memo:
            memo.add(self)
            yield prefix, self
            for module in self:
                yield from module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *, prefix: str = "", keep_vars: bool = False, **given: Any) -> Any:
        """Return the chunks' state dicts as one."""
        destination = given.get("destination")
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()  # type: ignore[attr-defined]  # noqa: SLF001
        for module in self:
            module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> _IncompatibleKeys:
        """Load each chunk's part, as a module does.

        Raises:
            RuntimeError: A shape differs; or ``strict``, and the names are not the same.
        """
        found = [module.load_state_dict(state_dict, False, assign) for module in self]
        missing = list(itertools.chain.from_iterable(one.missing_keys for one in found))
        nowhere = set(state_dict).intersection(*(one.unexpected_keys for one in found))
        unexpected = [name for name in state_dict if name in nowhere]
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"the state dict does not fit this rank's {len(self)} chunks: missing are "
                f"{', '.join(missing) or 'none'}; unexpected are {', '.join(unexpected) or 'none'}"
            )
        return _IncompatibleKeys(missing, unexpected)
