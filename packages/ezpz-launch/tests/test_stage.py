"""Staging: real node processes on loopback, each with a disk of its own; and the command."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import ezpz_launch
import ezpz_topo
from ezpz_launch._nodes import archive, stage_node
from ezpz_launch._nodes.archive import Python, Root, Source, What
from ezpz_launch._nodes.bad_nodes import recall
from ezpz_launch._nodes.tree import Tree

SOURCES = [str(Path(package.__file__).parents[1]) for package in (ezpz_launch, ezpz_topo)]


@pytest.fixture
def disk():
    """A folder in memory where there is one: what 24 nodes write is for no real disk."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared, prefix="ezpz-stage-") as folder:
        yield Path(folder)


@pytest.fixture
def data(tmp_path):
    """What is staged: 400 small files, one of several chunks, an empty one, links."""
    folder, some = tmp_path / "data", random.Random(7)
    for number in range(400):
        path = folder / f"p{number % 9}" / f"{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(some.randbytes(some.randrange(4000)))
    (folder / "big.so").write_bytes(some.randbytes(9 << 20))
    (folder / "empty").touch()
    (folder / "near").symlink_to("p1/1.py")
    (folder / "whole").symlink_to(folder / "p1")
    (folder / "outside").symlink_to("/usr/bin/env")
    time.sleep(archive._GRAIN / 1e9)  # what is younger is taken for changed at the next look
    return folder


def look(data, disk, source=Source):
    python = Python(str(data), str(data), "", "", "", "", [])
    what = What([Root(str(data), "test")], {str(data): str(data)}, [], python)
    return source(what, str(disk / "0"))


class Nodes:
    """Node processes of one staging, and its root."""

    def __init__(self, data, disk, count, *, patience=60.0, source=Source):
        self.source, self.disk, self.processes = look(data, disk, source), disk, []
        hosts = [f"host{node}" for node in range(count)]
        self.tree = Tree(hosts, here=True, patience=patience)
        self.tree.order("stage", self.source.name, 0.1, source=self.source)

    def __enter__(self):
        self.tree.start()
        return self

    def start(self, *which, folder=None, before=(), **options):
        for node in which:
            place = self.disk / str(node if folder is None else folder)
            place.mkdir(exist_ok=True)
            told = {"EZPZ_STAGE": f"{self.tree.where} {self.tree.secret}", "RANK": str(node)}
            words = [*before, sys.executable, "-I", "-S", stage_node.__file__, str(place)]
            self.processes.append(subprocess.Popen(words, env=told, **options))
        return self

    def done(self):
        assert self.tree.join(300)
        return self.tree

    def home(self, node=0):
        return self.disk / str(node) / f"ezpz-{os.getuid()}"

    def root(self, node=0):
        trees = [each for each in self.home(node).iterdir() if ".part-" not in each.name]
        newest = max(trees, key=lambda each: (each / ".ezpz").stat().st_mtime)
        return newest / "root"

    def __exit__(self, *_):
        self.tree.stop()
        for process in self.processes:
            try:
                process.wait()
            finally:
                process.kill()
                process.wait()


@pytest.fixture
def staged(data, disk):
    """Stage to so many nodes, each with a disk of its own that stays from one call to the next."""

    def stage(count, **options):
        with Nodes(data, disk, count, **options) as nodes:
            nodes.start(*range(count)).done()
        return nodes

    return stage


def is_same(data, copy):
    compared = subprocess.run(["diff", "-r", "--no-dereference", data, copy], check=False,
                              capture_output=True, text=True)  # fmt: skip
    lines = [line for line in compared.stdout.splitlines() if "whole differ" not in line]
    times = all(
        (copy / path.relative_to(data)).lstat().st_mtime_ns == path.lstat().st_mtime_ns
        for path in data.rglob("*")
        if path.is_file() and not path.is_symlink()
    )
    return not lines and times


def test_the_source_is_read_once_for_more_nodes_than_files_may_be_open(*, staged, data):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        nodes = staged(24)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert nodes.tree.failed() == {}
    assert nodes.source.bytes_read <= 1.02 * nodes.source.size
    for node in range(24):
        copy = Path(str(nodes.root(node)) + str(data))
        assert is_same(data, copy)
        # A link into what is staged stays in it.
        assert (copy / "whole").resolve() == (copy / "p1").resolve()


def test_a_second_start_sends_nothing_and_a_changed_environment_what_changed(*, staged, data):
    first = staged(3)
    Path(f"{first.root(1)}{data}/p1/compiled.pyc").touch()
    again = staged(3)
    assert len(again.tree.had) == 3
    assert again.source.bytes_read == 0
    (data / "p1" / "1.py").write_text("changed")
    (data / "p2" / "2.py").unlink()
    # Of the same size and time, as packages of reproducible builds are.
    status = (data / "p3" / "3.py").stat()
    (data / "p3" / "3.py").write_bytes(b"x" * status.st_size)
    os.utime(data / "p3" / "3.py", ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = staged(3)
    assert changed.tree.had == set()
    assert 0 < changed.source.bytes_read < changed.source.size / 2
    assert is_same(data, Path(str(changed.root(2)) + str(data)))


def test_a_file_that_may_change_unseen_is_taken_for_changed(*, data, disk, monkeypatch):
    assert look(data, disk).name == look(data, disk).name
    monkeypatch.setattr(archive, "_GRAIN", 3600 * 10**9)
    assert look(data, disk).name != look(data, disk).name


def test_a_node_that_lost_a_file_gets_it_from_one_that_has_it(*, staged, data, until):
    nodes = staged(2)
    Path(f"{nodes.root(1)}{data}/p4/4.py").unlink()
    with Nodes(data, nodes.disk, 2) as again:
        again.start(0)
        until(lambda: again.tree.had)
        again.start(1).done()
    assert again.tree.had == {0}
    assert is_same(data, Path(f"{again.root(1)}{data}"))


def test_nodes_of_which_some_are_killed_at_random_moments(*, data, disk, until):
    chance = random.Random(1)
    with Nodes(data, disk, 20) as nodes:
        nodes.start(*range(20))
        total = 20 * nodes.source.size
        until(lambda: len(nodes.tree._peers) == 20, seconds=120)
        victims = chance.sample(range(20), 4)
        for victim, moment in zip(victims, sorted(chance.random() for _ in victims), strict=True):
            until(lambda moment=moment: nodes.tree.bytes >= 0.8 * moment * total, seconds=200)
            nodes.processes[victim].kill()
        tree = nodes.done()
    killed = {f"host{victim}" for victim in victims}
    assert set(tree.failed()) == killed
    assert len(tree.whole) == 20 - len(killed)
    readers = 1 + sum(tree._peers[victim].parent == -1 for victim in victims)
    assert nodes.source.bytes_read <= min(readers, 2) * nodes.source.size
    for node in set(range(20)) - set(victims):
        assert list(nodes.home(node).glob("*.part-*")) == []
    # What a killed one left is not taken for whole, and goes when it starts again.
    with Nodes(data, disk, len(victims)) as again:
        for node, victim in enumerate(victims):
            again.start(node, folder=victim)
        assert again.done().failed() == {}
    for victim in victims:
        assert is_same(data, Path(f"{again.root(victim)}{data}"))
        assert list(again.home(victim).glob("*.part-*")) == []


class Damaged(Source):
    """A source of which a chunk arrives damaged, so many times."""

    times = 1

    def chunks(self, numbers):
        for number, sums, data in super().chunks(numbers):
            damaged = number == 1 and self.times > 0
            self.times -= damaged
            yield number, sums, bytes(len(data)) if damaged else data


def test_a_damaged_chunk_is_asked_for_again(*, staged, data):
    nodes = staged(2, source=Damaged)
    assert nodes.tree.failed() == {}
    assert is_same(data, Path(f"{nodes.root(1)}{data}"))


def test_who_keeps_sending_damaged_chunks_is_named(*, data, disk, staged, until):
    path = Path(f"{staged(1).root()}{data}/big.so")
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"not what was staged")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with Nodes(data, disk, 3) as nodes:
        nodes.start(0)
        until(lambda: nodes.tree.had)
        nodes.start(1, 2).done()
    assert list(nodes.tree.failed()) == ["host0"]
    assert "damaged" in nodes.tree.failed()["host0"]
    assert is_same(data, Path(f"{nodes.root(2)}{data}"))


def test_a_node_that_cannot_write_is_named_and_its_children_get_another_parent(
    *, data, disk, until
):
    def small():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))

    with Nodes(data, disk, 6) as nodes:
        nodes.start(0, preexec_fn=small)
        until(lambda: nodes.tree._peers)
        nodes.start(*range(1, 6)).done()
    assert list(nodes.tree.failed()) == ["host0"]
    assert "File too large" in nodes.tree.failed()["host0"]
    assert len(nodes.tree.whole) == 5
    assert list(nodes.home().iterdir()) == []


def test_a_disk_without_room_is_told(*, data, disk, small_disk):
    (disk / "0").mkdir()
    with Nodes(data, disk, 1) as nodes:
        nodes.start(0, before=small_disk("70m", disk / "0")).done()
    assert "MB free; expected" in nodes.tree.failed()["host0"]


@pytest.mark.slow
def test_a_node_that_does_not_go_on_is_left_out(*, data, disk, until):
    with Nodes(data, disk, 3, patience=8) as nodes:
        nodes.start(0)
        until(lambda: nodes.tree._peers)
        nodes.processes[0].send_signal(signal.SIGSTOP)
        nodes.start(1, 2).done()
        nodes.processes[0].kill()
    assert "host0" in nodes.tree.failed()
    assert len(nodes.tree.whole) == 2


def test_nodes_of_which_none_comes_are_left_out(*, data, disk):
    with Nodes(data, disk, 2, patience=0.2) as nodes:
        assert "no sign of it within 1 s" in nodes.done().failed()["host1"]


def test_two_launches_at_once_on_one_disk_make_one_tree(*, data, disk):
    with Nodes(data, disk, 3) as one, Nodes(data, disk, 3) as other:
        for nodes in (one, other):
            nodes.start(0, 1, 2, folder="shared")
        for nodes in (one, other):
            assert nodes.done().failed() == {}
    home = disk / "shared" / f"ezpz-{os.getuid()}"
    assert [each.name for each in home.iterdir()] == [one.source.name]
    assert is_same(data, Path(f"{home}/{one.source.name}/root{data}"))


def test_a_folder_that_is_not_our_own_is_not_used(*, data, disk):
    (disk / "0").mkdir()
    (disk / "0" / f"ezpz-{os.getuid()}").symlink_to(disk)
    with Nodes(data, disk, 1) as nodes:
        nodes.start(0).done()
    assert "expected a folder of this user's own" in nodes.tree.failed()["host0"]


def test_old_trees_go_but_not_those_in_use(*, staged, data):
    first = staged(1).root()
    (data / "p1" / "1.py").write_text("second")
    second = staged(1).root()
    (data / "p1" / "1.py").write_text("third")
    long_ago = time.time() - 30 * 86400
    for root in (first, second):
        os.utime(root.parent / ".ezpz", (long_ago, long_ago))
    user = subprocess.Popen(["sleep", "600"], env={"EZPZ_STAGED": str(first)})
    try:
        third = staged(1)
    finally:
        user.kill()
        user.wait()
    assert set(third.home().iterdir()) == {first.parent, third.root().parent}


def test_a_path_that_is_not_staged_is_its_own():
    assert ezpz_topo.get_staged_path("/nowhere", {}) == "/nowhere"
    assert ezpz_topo.get_staged_path("/nowhere", {"EZPZ_STAGED": "/tmp"}) == "/nowhere"


# The command, on this host.

SAYS = """
import json, multiprocessing, os, subprocess, sys
def prefix(queue):
    queue.put(sys.prefix)
if __name__ == "__main__":
    import project
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    child = spawn.Process(target=prefix, args=(queue,))
    child.start()
    print(json.dumps({
        "prefix": sys.prefix, "base": sys.base_prefix, "json": json.__file__,
        "project": project.__file__, "spawned": queue.get(), "tree": os.environ["EZPZ_STAGED"],
        "script": subprocess.run(["says-prefix"], capture_output=True, text=True).stdout.strip(),
        "child": subprocess.run(["python", "-c", "import sys; print(sys.prefix)"],
                                capture_output=True, text=True).stdout.strip(),
        "caches": os.environ["TORCHINDUCTOR_CACHE_DIR"],
    }))
    child.join()
"""


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """A home with an interpreter of the user's own in it, as uv, pyenv and conda make one."""
    home = tmp_path_factory.mktemp("home")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (home / "python" / "bin").mkdir(parents=True)
    shutil.copy(os.path.realpath(sys.executable), home / "python" / "bin" / version)
    (home / "python" / "bin" / "python").symlink_to(version)
    left_out = shutil.ignore_patterns("site-packages", "dist-packages", "test", "tests", "idlelib",
                                      "lib2to3", "tkinter", "config-*", "*.a", "unittest",
                                      "distutils", "ensurepip", "pydoc_data")  # fmt: skip
    library = Path(json.__file__).parents[1]
    shutil.copytree(library, home / "python" / "lib" / version, ignore=left_out)
    packages = home / "python" / "lib" / version / "site-packages"
    packages.mkdir(exist_ok=True)
    # Debian's own looks into dist-packages only.
    add = "import site, sys; site.addsitedir(sys.prefix + '/lib/{}/site-packages')\n"
    (packages.parent / "sitecustomize.py").write_text(add.format(version))
    # As a module of pyenv's: by this path the loader looks for what the module needs.
    module = packages.parent / "lib-dynload" / "as_pyenvs.so"
    module.parent.mkdir(exist_ok=True)
    module.write_bytes(b"\x7fELF\0%b\0" % os.fsencode(home / "python" / "lib"))
    return home


@pytest.fixture
def environment(home, tmp_path, clean_env):
    """Make an environment, of a kind, with an editable project and a console script."""
    project = tmp_path / "project" / "src"
    (project / "project").mkdir(parents=True)
    (project / "project" / "__init__.py").touch()
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"

    def make(kind):
        prefix = tmp_path / "env"
        if kind == "conda":
            shutil.copytree(home / "python", prefix, symlinks=True)
            (prefix / "conda-meta").mkdir()
        else:
            python = sys.executable if kind == "site" else home / "python" / "bin" / "python"
            words = [python, "-m", "venv", "--without-pip", "--symlinks", prefix]
            subprocess.run(words, check=True)
        packages = prefix / "lib" / version / "site-packages"
        (packages / "project.pth").write_text("\n".join([str(project), *SOURCES]))
        script = prefix / "bin" / "says-prefix"
        script.write_text(f"#!{prefix}/bin/python\nimport sys; print(sys.prefix)\n")
        script.chmod(0o755)
        local = tmp_path / "local"
        local.mkdir(exist_ok=True)
        # Of conda's the user's home is where it lies.
        own = home if kind == "venv" else tmp_path if kind == "conda" else tmp_path / "elsewhere"
        env = {**clean_env, "HOME": str(own), "PATH": f"{prefix}/bin:/usr/bin:/bin",
               "TMPDIR": str(local)}  # fmt: skip
        return prefix, env

    return make


def run(prefix, env, *words, first=(), launcher="spawn", cwd=None):
    words = [*first, *(["--launcher", launcher] if launcher else []), *words]
    return subprocess.run([prefix / "bin" / "python", "-m", "ezpz_launch", *words], check=False,
                          env=env, cwd=cwd, capture_output=True, text=True)  # fmt: skip


@pytest.mark.parametrize("kind", ["venv", "site", "conda"])
def test_the_ranks_are_in_the_staged_environment_and_all_that_they_start(
    *, environment, home, tmp_path, kind
):
    prefix, env = environment(kind)
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it where something was compiled
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    done = run(prefix, env, "-n", "1", "--stage", "python", script)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    tree = said["tree"]
    assert tree.startswith(f"{tmp_path}/local/ezpz-{os.getuid()}/")
    there = f"{tree}{prefix}"
    assert [said[each] for each in ("prefix", "spawned", "script", "child")] == [there] * 4
    assert said["project"].startswith(f"{tree}{tmp_path}/project/src/")
    assert said["json"].startswith(tree) == (kind != "site")
    assert said["caches"].startswith(f"{tmp_path}/local/")
    assert "1 node got" in done.stderr
    if kind == "venv":
        (module,) = Path(f"{tree}{home}/python").glob("lib/*/lib-dynload/as_pyenvs.so")
        assert b"\0$ORIGIN/../..\0" in module.read_bytes()


# As `pip install -e` of setuptools writes it for a project whose package lies at its top.
FINDER = """
import sys
from importlib.util import spec_from_file_location
MAPPING = {"flat": %r}
class _EditableFinder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        init = MAPPING.get(fullname, "") + "/__init__.py"
        return spec_from_file_location(fullname, init) if fullname in MAPPING else None
def install():
    sys.meta_path.append(_EditableFinder)
"""
FINDS = """
import json, os, flat, hydra_plugins.mine, implicit.deep.mine
from ezpz_topo import get_staged_path
here, tree = os.getcwd(), os.environ["EZPZ_STAGED"]
modules = {"flat": flat, "namespace": hydra_plugins.mine, "deep": implicit.deep.mine}
paths = {what: os.path.realpath(module.__file__) for what, module in modules.items()}
paths["kernel"] = os.path.dirname(flat.__file__) + "/csrc/k.cu"
paths["data"] = os.path.realpath(get_staged_path("work/data/tokens.bin"))
shown = {path.replace(tree + here, "TREE").replace(here, "HERE"): os.path.exists(path)
         for path in paths.values()}
print(json.dumps(shown))
"""


def test_packages_are_staged_with_their_data_and_without_an_init(environment, tmp_path):
    prefix, env = environment("site")
    (packages,) = (prefix / "lib").glob("*/site-packages")
    (packages / "__editable___flat_finder.py").write_text(FINDER % str(tmp_path / "clone/flat"))
    install = "import __editable___flat_finder; __editable___flat_finder.install()"
    (packages / "__editable__.flat.pth").write_text(install)
    for name in ("clone/flat/__init__.py", "clone/flat/csrc/k.cu", "work/data/tokens.bin",
                 "work/hydra_plugins/mine/__init__.py", "work/implicit/deep/mine.py"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    env |= {"PYTHONPATH": str(tmp_path / "work"), "HOME": str(tmp_path)}
    first = ("-n", "1", "--stage", "--stage-data", "work/data")
    done = run(prefix, env, *first, "python", "-c", FINDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys([
        "TREE/clone/flat/__init__.py", "TREE/work/hydra_plugins/mine/__init__.py",
        "HERE/work/implicit/deep/mine.py",  # by a link
        "TREE/clone/flat/csrc/k.cu", "TREE/work/data/tokens.bin",
    ], True)  # fmt: skip


def test_an_interpreter_is_the_staged_one_by_a_relative_path_too(environment, tmp_path):
    prefix, env = environment("site")
    code = ("-c", "import sys; print(sys.prefix)")
    done = run(prefix, env, "-n", "1", "--stage", "./env/bin/python", *code, cwd=tmp_path)
    assert done.stdout.startswith(f"{tmp_path}/local/ezpz-"), done.stderr
    assert done.stdout.endswith(f"{prefix}\n")
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {prefix}/bin/python "$@"\n')
    (tmp_path / "python").chmod(0o755)
    done = run(prefix, env, "-n", "1", "--stage", "./python", *code, cwd=tmp_path)
    assert done.stdout == f"{prefix}\n"
    assert f"./python is not in {prefix}, which is staged: the ranks do not" in done.stderr


def test_a_venv_over_conda_has_its_libraries_and_what_is_not_staged_stays(environment, tmp_path):
    prefix, env = environment("conda")
    (packages,) = (prefix / "lib").glob("python*/site-packages")
    for source, name in zip(SOURCES, ("ezpz_launch", "ezpz_topo"), strict=True):
        (packages / name).symlink_to(f"{source}/{name}")  # the venv does not see them
    (prefix / "lib" / "libssl.so.3").touch()
    (prefix / "lib" / "libssl.so").symlink_to("libssl.so.3")
    venv = tmp_path / "venv"
    words = [prefix / "bin" / "python", "-m", "venv", "--without-pip", "--symlinks", venv]
    subprocess.run(words, check=True)
    names = ("VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH")
    env |= {"CONDA_PREFIX": str(prefix), "LD_LIBRARY_PATH": f"/opt:{prefix}/lib:{prefix}/bin",
            "PATH": f"{venv}/bin:/usr/bin:/bin"}  # fmt: skip
    code = f"import os, sys; print(sys.base_prefix, *map(os.environ.get, {names}))"
    done = run(prefix, env, "-n", "1", "--stage", "python", "-c", code)
    assert done.returncode == 0, done.stderr
    base, *said = done.stdout.split()
    tree = base.removesuffix(str(prefix))
    assert tree.startswith(f"{tmp_path}/local/")
    paths = ["/opt", f"{base}/lib", f"{base}/bin", f"{prefix}/bin"]  # of bin a part is staged
    assert said == [f"{tree}{venv}", str(prefix), ":".join(paths)]
    assert {"libssl.so", "libssl.so.3"} < set(os.listdir(f"{base}/lib"))


def test_the_users_site_packages_are_those_of_the_copy(environment, tmp_path):
    prefix, env = environment("conda")
    (packages,) = (prefix / "lib").glob("python*/site-packages")
    mine = tmp_path / ".local" / packages.relative_to(prefix) / "mine.py"
    mine.parent.mkdir(parents=True)
    mine.touch()
    code = "import mine, os; print(os.environ['EZPZ_STAGED'], mine.__file__)"
    done = run(prefix, env, "-n", "1", "--stage", "python", "-c", code)
    assert done.returncode == 0, done.stderr
    tree, found = done.stdout.split()
    assert found == f"{tree}{mine}"


def test_a_staged_environment_is_used_again_listed_and_cleaned(environment, tmp_path):
    prefix, env = environment("venv")
    # What the first launch compiled is sent to the second, and nothing to the third.
    for _ in range(3):
        again = run(prefix, env, "-n", "1", "--stage", "python", "-c", "0")
    assert "0 nodes got 0 MB" in again.stderr
    assert ", 1 had it already" in again.stderr
    dry = run(prefix, env, "--stage", "--dry-run", "--json", "python", "-V")
    assert json.loads(dry.stdout)["environment"]["PATH"].startswith(f"{tmp_path}/local/")
    status = run(prefix, env, "--status", first=["stage"])
    assert f"1 of 1 nodes  last used 0.0 h ago  {prefix}" in status.stdout
    run(prefix, env, "--clean", first=["stage"])
    status = run(prefix, env, "--status", first=["stage"])
    assert "nothing is staged" in status.stdout


def test_what_changes_while_it_is_staged_is_no_hosts_fault(environment, process, tmp_path):
    prefix, env = environment("site")
    log = tmp_path / "log"
    log.touch()
    process("sh", "-c", f"while :; do echo >>{log}; sleep 0.001; done")
    done = run(prefix, env, "-n", "1", "--stage", "--stage-data", log, "python", "-c", "0")
    assert f"{log} changed while it was staged; start again\n" in done.stderr
    assert recall(env) == []


def test_a_spare_that_cannot_be_staged_to_is_no_attempt(environment, tmp_path):
    prefix, env = environment("site")
    home, hosts = tmp_path / "local" / f"ezpz-{os.getuid()}", tmp_path / "hosts"
    hosts.write_text(f"{os.uname().nodename}\nlocalhost\n")
    words = ("--hostfile", hosts, "-N", "1", "--spares", "1", "--stage")
    done = run(prefix, env, *words, "sh", "-c", f"mv {home} {home}.away; >{home}; kill -9 $$")
    assert "ezpz-launch: no other attempt: not staged on any of 1 nodes: " in done.stderr
    assert done.returncode == 137
    (record,) = json.loads(run(prefix, env, "--json", first=["launches"], launcher=None).stdout)
    assert (record["exit_status"], record["end"] is None) == (137, False)


def test_what_cannot_be_is_told_in_one_line(environment):
    prefix, env = environment("site")
    for words, said in (
        (["--stage", "--stage-data", "/nowhere", "true"], "/nowhere: no such file or folder"),
        (["--stage-data", "/tmp", "true"], "expected --stage WHAT beside it"),
        (["stage", "/usr/share"], "/usr/share is no environment"),
    ):
        at = words[0] == "stage"
        done = run(prefix, env, *words[at:], first=words[:at])
        assert done.returncode in (1, 2), words
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = run(prefix, {**env, "EZPZ_STAGE_DIR": "/nowhere"}, prefix, first=["stage"])
    assert (done.returncode, "/nowhere/ezpz-" in done.stderr) == (1, True)
