"""Make, complete or repair the clone's environment, and print its path.

usage: environment.py PYTHON MACHINE [PACKAGE...]; scripts/lib/environment runs it with that Python
exit status: 0, 1 a step failed

In the environment's folder .ezpz are state.json (how it was made), summary and pip.log.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zlib
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("topo", "device", "tp", "spmd", "dist", "launch", "obs", "suite")
SETTINGS = {name: os.environ.get(f"EZPZ_{name}", "") for name in (
    "VENV", "PYTHON", "SITE_PACKAGES", "INDEX", "WHEELS", "LOG_LEVEL")}  # fmt: skip


class StepError(Exception):
    """A step failed; the message says what to do."""


@dataclass
class State:
    """What earlier calls left, as state.json has it."""

    kind: str = ""  # "made" by us, or "adopted": an environment of someone else's
    version: str = ""  # of the Python that it was made with
    pins: list[str] = field(default_factory=list)  # what the site brings, kept: name==version
    venv: str = ""
    mpi: str = ""  # from "path", of the "site", or a "wheel"
    mpicc: str = ""
    mpiexec: str = ""
    built_with: str = ""  # the mpicc of the mpi4py that is installed
    stamp: str = ""  # of all that determines what gets installed; empty: not complete


def say(text: str) -> None:
    if text.startswith("warning: ") or SETTINGS["LOG_LEVEL"][:1].upper() not in ("W", "E", "C"):
        print(f"ezpz: {text}", file=sys.stderr, flush=True)


def runs(python: Path) -> bool:
    try:
        return not subprocess.run([python, "-ISc", ""], capture_output=True, check=False).returncode
    except OSError:
        return False


def output_of(*words: str | Path) -> str:
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False).stdout


def print_site_packages() -> None:
    """Print version and pins of this Python, or what is wrong with it. torch is not imported."""
    sys.path = [folder for folder in sys.path[1:] if folder]  # not the working directory
    version, pins, problem = ".".join(map(str, sys.version_info[:3])), [], ""
    texts = [path.read_text("utf-8") for path in ROOT.glob("packages/*/pyproject.toml")]
    for name in ("torch", "mpi4py", "numpy") if SETTINGS["SITE_PACKAGES"] != "0" else ():
        spec = find_spec(name)
        if spec is None or not spec.origin:
            continue
        found = next((d.version for d in importlib.metadata.distributions(name=name)), "")
        least = max(re.findall(rf'"{name}>=([0-9.]+)', "".join(texts)), key=numbers, default="0")
        if found and numbers(found) >= numbers(least):
            pins.append(f"{name}=={found}")
        elif name == "torch":
            problem = (
                f"has torch {found or '(no version recorded)'} at {spec.origin}, but {least} or "
                "newer is needed: choose another Python, or set EZPZ_SITE_PACKAGES=0 to install one"
            )
    print(json.dumps([version, pins, problem]))


def numbers(version: str) -> list[int]:
    return [int(n) for n in re.match("[0-9.]*", version)[0].split(".") if n]


def site_packages_of(python: str | Path) -> tuple[str, list[str]]:
    """Return the version of a Python, and its torch, mpi4py and numpy that are to be kept."""
    told = output_of(python, __file__, "--site-packages")
    version, pins, problem = json.loads(told) if told else ("", [], "fails")
    if problem:
        raise StepError(f"no usable Python: {python} ({version}) {problem}")
    return version, pins


def with_siblings(names: list[str]) -> list[str]:
    wanted: list[str] = []
    for name in (name.removeprefix("ezpz-") for name in names):
        if name not in PACKAGES:
            known = " ".join(f"ezpz-{package}" for package in PACKAGES)
            raise StepError(f"no package ezpz-{name} in this clone; expected some of: {known}")
        project = tomllib.loads((ROOT / f"packages/ezpz-{name}/pyproject.toml").read_text("utf-8"))
        needed = re.findall(r"\bezpz-([a-z]+)", " ".join(project["project"]["dependencies"]))
        wanted += [name, *with_siblings(needed)]
    return [name for name in PACKAGES if name in wanted]


class Environment:
    def __init__(self, python: str, machine: str) -> None:
        self.python, self.machine = python, machine
        self.venv, self.active = self.choose()
        self.bin, self.folder = self.venv / "bin", self.venv / ".ezpz"
        self.log = self.folder / "pip.log"
        self.uv = self.which("uv")
        try:
            self.state = State(**json.loads((self.folder / "state.json").read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            self.state = State()

    def choose(self) -> tuple[Path, bool]:
        """Return the environment's folder, and whether it is the active one."""
        asked, active = SETTINGS["VENV"], os.environ.get("VIRTUAL_ENV", "")
        venv = Path(os.path.abspath(asked)) if asked else None
        if active and runs(Path(active, "bin/python")):
            if venv and not (venv.exists() and venv.samefile(active)):
                say(f"warning: EZPZ_VENV={asked} is not used while {active} is active")
            return Path(active), True
        venv = venv or self.default_place()
        if active and Path(active) != venv:  # our own broken one is repaired
            why = f"the active VIRTUAL_ENV={active} has no bin/python that runs"
            raise StepError(f"{why}: deactivate, or unset VIRTUAL_ENV")
        return venv, False

    def default_place(self) -> Path:
        """Return .venv of the clone, or a place of the user's where the clone cannot be written."""
        generic = self.machine == "workstation" or self.machine.startswith("generic-")
        name = "" if generic else f"{self.machine}-py{sys.version_info[0]}.{sys.version_info[1]}"
        venv, whole = ROOT / ".venv" / name, ROOT / ".venv"
        if (venv / ".ezpz").is_dir() or os.access(whole if whole.exists() else ROOT, os.W_OK):
            return venv
        data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
        return Path(data, "ezpz", f"{name or 'venv'}-{zlib.crc32(str(ROOT).encode())}")

    def folders(self) -> list[str]:
        """Return the PATH of the machine: the environment's own commands are left out."""
        own = os.path.realpath(self.bin)
        return [folder for folder in os.get_exec_path() if os.path.realpath(folder) != own]

    def which(self, command: str) -> str:
        return shutil.which(command, path=os.pathsep.join(self.folders())) or ""

    def save(self) -> None:
        """Write the state; it marks a half-made environment as ours to repair."""
        new = self.folder / "state.new"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(asdict(self.state)), "utf-8")
            new.replace(self.folder / "state.json")
        except OSError as error:
            remedy = "set EZPZ_VENV to a path that you may write to"
            raise StepError(f"cannot write to {self.venv}: {remedy}") from error

    def prepare(self) -> None:
        """Have an environment: an active one or someone else's as it is, else one of ours."""
        # Nothing is there, or environments of other machines alone.
        free = not self.venv.exists() or (self.venv.is_dir() and not self.contents())
        if not self.active and (self.state.kind == "made" or free):
            version, pins = site_packages_of(self.python)
            # numpy alone is not worth opening the environment to all of the site's packages.
            pins = pins if {"torch", "mpi4py"} & {pin.partition("==")[0] for pin in pins} else []
            if not self.still_fits(version, pins):
                self.state = State("made", version, pins, str(self.venv))
                self.make()
        elif not runs(self.bin / "python"):
            why = "was not made here, and its bin/python does not run"
            raise StepError(f"{self.venv} {why}: remove it, or set EZPZ_VENV")
        elif not self.state.kind:
            version, pins = site_packages_of(self.bin / "python")
            self.state = State("adopted", version, pins, str(self.venv))
            self.save()

    def contents(self) -> list[Path]:
        return [path for path in self.venv.iterdir()
                if path.name != ".ezpz" and "-py3." not in path.name]  # fmt: skip

    def still_fits(self, version: str, pins: list[str]) -> bool:
        """Return whether what an earlier call made is still the right one."""
        # PATH differs between login node and nodes: a Python of another minor version is no reason
        # to make it again, unless the site's torch comes from that Python.
        was = self.state
        if was.kind != "made" or was.venv != str(self.venv) or not runs(self.bin / "python"):
            return False
        if not pins and not SETTINGS["PYTHON"] and not SETTINGS["SITE_PACKAGES"]:
            return set(was.pins) <= set(site_packages_of(self.bin / "python")[1])
        same_minor = was.version.rpartition(".")[0] == version.rpartition(".")[0]
        return was.pins == pins and (same_minor or not (pins or SETTINGS["PYTHON"]))

    def make(self) -> None:
        pins = self.state.pins
        kept = f"; keeping its {' '.join(pins)}" if pins else ""
        say(f"making {self.venv} with Python {self.state.version}, {self.python}{kept}")
        self.state.stamp = self.state.built_with = ""
        self.save()
        for path in self.contents():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        uv = [self.uv, "venv", "--allow-existing", "--python", self.python]
        words = uv if self.uv else [self.python, "-P", "-m", "venv"]
        self.log.write_text("", "utf-8")
        if self.run([*words, *(["--system-site-packages"] if pins else []), self.venv]):
            raise self.failed(" ".join(words[:3]))

    def failed(self, what: str) -> StepError:
        lines = self.log.read_text("utf-8", "replace").splitlines() if self.log.exists() else []
        return StepError(
            *lines[-15:],
            f"ezpz: error: {what} failed: see above and {self.log}. Correct that (without a "
            "network: EZPZ_WHEELS=folder, or ezpz_set_proxy) and call ezpz_setup_env again: it "
            "repairs what is half done",
        )

    def pip(self, *words: str | Path, env: dict[str, str] | None = None) -> None:
        args = ["install", "-c", self.folder / "constraints.txt", *words]
        if SETTINGS["INDEX"]:
            args += ["--index-url", SETTINGS["INDEX"]]
        if SETTINGS["WHEELS"]:
            args += ["--no-index", "--find-links", SETTINGS["WHEELS"]]
        shown = sys.stderr.isatty()
        if self.uv:
            args = [self.uv, "pip", *args, "--python", self.bin / "python"]
            args += ["--override", self.folder / "overrides.txt"]
        else:
            # -P: the working directory is not searched for modules. --no-user: a site's PIP_USER=1
            # would install outside the environment.
            args = [self.bin / "python", "-P", "-m", "pip", *args, "--no-user"]
            args += ["--disable-pip-version-check", *(["--log", self.log] if shown else [])]
        if self.run(args, shown=shown, env=env):
            kept = f" (keeping {' '.join(self.state.pins)})" if self.state.pins else ""
            raise self.failed(f"{'uv ' if self.uv else ''}pip install{kept}")

    def run(self, words: list[str | Path], *, shown: bool = False,
            env: dict[str, str] | None = None) -> int:  # fmt: skip
        with self.log.open("a", encoding="utf-8") as log:
            out = sys.stderr if shown else log
            env = {**os.environ, **(env or {})}
            return subprocess.run(words, stdout=out, stderr=out, env=env, check=False).returncode

    def choose_mpi(self) -> None:
        """Decide on MPI as the environment has it; only another MPICC asks for another one."""
        # PATH differs between login node and nodes, and what works is not taken out.
        state, asked = self.state, os.environ.get("MPICC")
        if not state.mpi and state.kind == "made" and (self.bin / "mpiexec").exists():
            state.mpi, state.mpicc = "wheel", state.built_with
        if state.mpi and asked in (None, state.mpicc):
            return
        of_site = any(pin.startswith("mpi4py==") for pin in state.pins)
        state.mpicc = "" if of_site else self.which("mpicc") if asked is None else asked
        state.mpi, state.mpiexec = "path", self.mpiexec_of_machine()
        # The site's mpi4py has an MPI even where only srun starts it: a second one beside it would
        # start N worlds of one.
        if not state.mpiexec and ((of_site and state.kind == "made") or state.mpicc):
            state.mpi, state.mpiexec = "site", f"the one of {state.mpicc or 'mpi4py'}"
        elif not state.mpiexec:
            state.mpi = "wheel"

    def mpiexec_of_machine(self) -> str:
        """Return the first mpiexec of an MPI, by ezpz-launch's rule: that of PBS has none."""
        sys.path[:0] = [str(ROOT / f"packages/ezpz-{name}/src") for name in ("launch", "topo")]
        from ezpz_launch import LaunchError  # noqa: PLC0415
        from ezpz_launch._plan.identify import find_mpiexec  # noqa: PLC0415

        try:
            return find_mpiexec({"PATH": os.pathsep.join(self.folders())}).path
        except LaunchError:
            return ""

    def stamp_of(self) -> str:
        state = self.state
        version = output_of(self.bin / "python", "-ISc", "import sys; print(sys.version)")
        files = [ROOT / f"packages/ezpz-{name}/pyproject.toml" for name in PACKAGES]
        texts = [path.read_text("utf-8") for path in (*files, ROOT / "constraints.txt")]
        facts = [str(ROOT), str(self.venv), version, state.pins, state.mpi, state.mpicc, texts]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def install(self, packages: list[str], stamp: str) -> None:
        """Install these packages, editable; ``stamp`` is noted when all is done, unless empty."""
        self.state.stamp, state = "", self.state
        self.save()
        pip = [self.bin / "python", "-P", "-m", "pip"]
        if not self.uv and self.run([*pip, "--version"]):
            if state.kind != "made":
                raise StepError(f"no working pip: run {self.bin}/python -m ensurepip")
            self.make()
        # pip writes INSTALLER near the end, and takes an interrupted install for complete.
        installed = self.venv.glob("lib/python*/site-packages/*.dist-info")
        for folder in installed if state.kind == "made" else ():
            if not (folder / "INSTALLER").exists():
                shutil.rmtree(folder)
        self.write_constraints()
        if state.kind == "made" and state.mpi != "wheel":  # its mpiexec would hide the machine's
            uv = [self.uv, "pip", "uninstall", "--python", self.bin / "python", "mpich"]
            self.run(uv if self.uv else [*pip, "uninstall", "-y", "mpich"])
        if "dist" in packages:
            self.build_mpi4py()
        words: list[str | Path] = ["--no-build-isolation"] if stamp else []
        if stamp:
            # Seven editable builds in 2 s instead of 15 s.
            say(f"installing the build backend (log: {self.log})")
            self.pip("hatchling", "editables")
        for name in packages:
            words += ["-e", f"{ROOT}/packages/ezpz-{name}" + ("[examples]" * (name == "suite"))]
        if "dist" in packages and state.mpi == "wheel":
            words += ["mpich"]
        first = "the first time, that takes a minute or more"
        say(f"installing the packages and what they need; {first}")
        self.pip(*words)
        # Whoever imports editable sources first compiles them: not to be every rank of a job.
        compileall = ["-m", "compileall", "-q", "-x", "/(tests|benchmarks)/", ROOT / "packages"]
        self.run([self.bin / "python", "-P", *compileall])
        self.write_summary(state.mpiexec if "dist" in packages else "")
        state.stamp = stamp
        self.save()

    def write_constraints(self) -> None:
        names = [pin.partition("==")[0] for pin in self.state.pins]
        lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        lines = [line for line in lines if line.partition("==")[0] not in names] + self.state.pins
        # uv does not see the site's packages: it is told that nothing needs those that are kept.
        overrides = [f"{name}; python_version < '0'" for name in names]
        for file, told in (("constraints.txt", lines), ("overrides.txt", overrides)):
            (self.folder / file).write_text("".join(f"{line}\n" for line in told), "utf-8")
        self.log.write_text("", "utf-8")

    def build_mpi4py(self) -> None:
        """Build mpi4py if the machine's mpicc is another one; without one take the wheel."""
        mpicc, wheels = self.state.mpicc, SETTINGS["WHEELS"]
        if mpicc and wheels and not list(Path(wheels).rglob("mpi4py-*.tar.gz")):
            why = f"no mpi4py-*.tar.gz in EZPZ_WHEELS={wheels} to build with {mpicc}"
            say(f"warning: {why}: its wheel is taken")
            mpicc = ""
        if mpicc == self.state.built_with:
            return
        words = ["--force-reinstall", "--no-deps", "mpi4py"]
        if mpicc:
            say(f"building mpi4py with {mpicc} (MPICC= takes its wheel)")
            # A cached one may be of another MPI.
            words = ["--no-binary", "mpi4py", "--no-cache-dir", *words]
        self.pip(*words, env={"MPICC": mpicc} if mpicc else None)
        self.state.built_with = mpicc
        self.save()

    def write_summary(self, mpi: str) -> None:
        code = """
import sys, importlib.metadata as md
mpi, *pins = sys.argv[1:]
def at(name):
    dist = next(iter(md.distributions(name=name)), None)
    kept = any(pin.startswith(name + "==") for pin in pins)
    how = f"kept, from {dist.locate_file('')}" if dist and kept else "installed by pip"
    return f"{name} {dist.version} ({how})" if dist else f"no {name}"
version = "Python %d.%d.%d" % sys.version_info[:3]
print(version, at("torch"), "MPI: " + (mpi or at("mpich")), sep=", ")
"""
        said = output_of(self.bin / "python", "-Pc", code, mpi, *self.state.pins)
        (self.folder / "summary").write_text(said, "utf-8")


def main(python: str, machine: str, *names: str) -> None:
    packages = with_siblings(list(names or PACKAGES))
    if (wheels := SETTINGS["WHEELS"]) and not Path(wheels).is_dir():
        raise StepError(f"EZPZ_WHEELS={wheels}; expected a folder of wheels: correct or unset it")
    environment = Environment(python, machine)
    environment.prepare()
    environment.choose_mpi()
    stamp = environment.stamp_of()
    if environment.state.stamp != stamp:
        environment.install(packages, "" if names else stamp)
    print(environment.venv)


if __name__ == "__main__":
    try:
        print_site_packages() if sys.argv[1:] == ["--site-packages"] else main(*sys.argv[1:])
    except StepError as error:
        *lines, last = error.args
        print(*lines, last if lines else f"ezpz: error: {last}", sep="\n", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
