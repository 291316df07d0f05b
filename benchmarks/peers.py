"""The peers, each in an environment of its own below ``.hatch/peers``.

An environment is made when first asked for, by pip with this repository's constraints, and kept.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from callee import last_line

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".hatch" / "peers"
CONSTRAINTS = ROOT / "constraints.txt"


class PeerMissingError(Exception):
    """A peer cannot be installed or found here; the message says why."""


@dataclass(frozen=True)
class Recipe:
    """What pip installs, and whether the peer works with torch."""

    requirement: str
    torch: bool = False


RECIPES = {
    "python-hostlist": Recipe("python-hostlist"),
    "ClusterShell": Recipe("ClusterShell"),
    "submitit": Recipe("submitit"),
    "accelerate": Recipe("accelerate", torch=True),
    "transformers": Recipe("transformers", torch=True),
    "peft": Recipe("peft", torch=True),
    "lightning-fabric": Recipe("lightning-fabric", torch=True),
    "deepspeed": Recipe("deepspeed", torch=True),
    "TensorBoard": Recipe("tensorboard", torch=True),
    "W&B": Recipe("wandb", torch=True),
    "MLflow": Recipe("mlflow-skinny", torch=True),
    "trackio": Recipe("trackio", torch=True),
}


@dataclass(frozen=True)
class Peer:
    """A peer that is there: its name with the version, and its interpreter."""

    name: str
    python: str

    @property
    def site_packages(self) -> str:
        """Where its modules are."""
        return _site_packages(Path(self.python).parent.parent)


def peer(name: str) -> Peer:
    """Return a peer, after making its environment if it is not there yet.

    Raises:
        PeerMissingError: pip cannot install it, with pip's last word.
    """
    recipe, home = RECIPES[name], HOME / name
    python, made = home / "bin" / "python", home / "made.json"
    # Made again when any of these has changed.
    constraints = sha256(CONSTRAINTS.read_bytes()).hexdigest()
    key = [recipe.requirement, sys.version, sysconfig.get_path("purelib"), constraints]
    try:
        found = json.loads(made.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or half written
        found = {}
    if found.get("key") != key:
        found = {"key": key, "version": _make(recipe, home, python)}
        # Written last: an interrupted installation is made again.
        made.write_text(json.dumps(found), encoding="utf-8")
    return Peer(f"{name} {found['version']}", str(python))


def _make(recipe: Recipe, home: Path, python: Path) -> str:
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, symlinks=True)
    if recipe.torch:
        # torch is 200 MB to 3 GB: it is taken from the environment that the tests have, behind
        # whatever pip puts here; so is what pip finds there in the version of the constraints.
        # A path that a .pth file adds has its own .pth files unread: no package of ours gets in.
        pth = Path(_site_packages(home), "torch_of_the_tests.pth")
        pth.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", "--quiet", "--retries=1", "--timeout=30",
         "--constraint", str(CONSTRAINTS), recipe.requirement],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        env=os.environ | {"PIP_REQUIRE_VIRTUALENV": "0"},
    )  # fmt: skip
    if done.returncode:
        shutil.rmtree(home)
        raise PeerMissingError(f"not installable: {last_line(done.stderr)}")
    code = f"import importlib.metadata as m; print(m.version({recipe.requirement!r}))"
    asked = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def _site_packages(home: Path) -> str:
    return sysconfig.get_path("purelib", "venv", {"base": str(home), "platbase": str(home)})


def present(names: Sequence[str]) -> tuple[dict[str, Peer], dict[str, str]]:
    """Return the peers that are there, and of the others why they are not."""
    there: dict[str, Peer] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            there[name] = peer(name)
        except PeerMissingError as error:
            missing[name] = str(error)
    return there, missing
