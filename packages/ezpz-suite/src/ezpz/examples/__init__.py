"""Complete, small training scripts: ``ezpz-launch python -m ezpz.examples.NAME``."""

import sys
from importlib.util import find_spec

# What an example may import, and what to install for it.
EXTRAS = {
    "sklearn": "ezpz-suite[examples]",
    **dict.fromkeys(["accelerate", "peft", "transformers"], "ezpz-suite[huggingface]"),
    **dict.fromkeys(["jinja2", "matplotlib"], "ezpz-obs[report]"),
    "deepspeed": "ezpz-suite[deepspeed]",
    "lightning_fabric": "ezpz-suite[fabric]",
}
_NEEDS = {
    **dict.fromkeys(["ddp_resume", "diffusion", "minimal", "vit"], ("sklearn",)),
    "accelerate": ("sklearn", "accelerate"), "deepspeed_zero": ("sklearn", "deepspeed"),
    **dict.fromkeys(["finetune", "hf_trainer"], ("transformers",)),
    "lightning_fabric": ("sklearn", "lightning_fabric"),
}  # fmt: skip


def speaks() -> bool:
    """Return whether this rank says what all of them find: the first, or one that knows no rank."""
    from ezpz_topo import TopoError, get_rank

    try:
        return get_rank() == 0
    except TopoError:
        return True


def said(name: str, what: str) -> int:
    """Say what the user can mend, once, and return the exit status for it."""
    if speaks():
        print(f"{name}: {what}", file=sys.stderr)
    return 2


def _refuse_without(name: str) -> None:
    for package in _NEEDS.get(name, ()):
        if find_spec(package) is None:
            sys.exit(said(name, f"needs {package}: pip install '{EXTRAS[package]}'"))


# Of ``python -m ezpz.examples.NAME`` this is imported first; torch alone takes seconds.
for _before, _word in zip(sys.orig_argv, sys.orig_argv[1:], strict=False):
    if _before == "-m" and _word.startswith(f"{__name__}."):
        _name = _word.removeprefix(f"{__name__}.")
        _refuse_without(_name)
        if "--help" not in sys.argv and speaks():
            print(f"{_name}: importing torch", file=sys.stderr, flush=True)
