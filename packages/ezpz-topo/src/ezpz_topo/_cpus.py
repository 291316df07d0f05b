"""CPUs and memory: what this process may use, and what of this node the job may use."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from ._errors import InvalidVariableError


def get_cpu_count(root: str = "/") -> int:
    """Return the number of logical CPUs that this process may really use, at least 1.

    The smaller of its affinity and its cgroup's quota.

    Args:
        root: Where ``proc`` and ``sys`` are found; for tests.
    """
    return cpu_count_with_source(root)[0]


def cpu_count_with_source(root: str = "/") -> tuple[int, str]:
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
        return _limit_by_quota(count, "CPU affinity of this process", root)
    return _limit_by_quota(os.cpu_count() or 1, "os.cpu_count()", root)


def get_cpus_per_node(env: Mapping[str, str] | None = None, *, root: str = "/") -> int:
    """Return the number of logical CPUs of this node that the job may use, at least 1.

    Not this process's affinity: a rank bound to one core is one of many on its node.
    ``SLURM_CPUS_ON_NODE`` in a Slurm job, else every CPU of the node, less what the cgroup's
    cpuset and quota withhold. PBS's ``NCPUS`` is not read: it is the threads of one MPI
    process, ``ompthreads`` where the job requested them (OpenPBS, start_exec.c).

    Args:
        env: The environment to read; default ``os.environ``.
        root: Where ``proc`` and ``sys`` are found; for tests.

    Raises:
        InvalidVariableError: ``SLURM_CPUS_ON_NODE`` is no whole number from 1.
    """
    return cpus_per_node_with_source(env, root=root)[0]


def cpus_per_node_with_source(
    env: Mapping[str, str] | None = None, *, root: str = "/"
) -> tuple[int, str]:
    env = os.environ if env is None else env
    text = env.get("SLURM_CPUS_ON_NODE", "")
    if text and env.get("SLURM_JOB_ID"):
        if not re.fullmatch("[0-9]{1,9}", text) or not int(text):
            raise InvalidVariableError(
                f"SLURM_CPUS_ON_NODE={text[:40]!r}; expected a whole number from 1; "
                "unset SLURM_CPUS_ON_NODE, or start inside the Slurm job"
            )
        return _limit_by_quota(int(text), "SLURM_CPUS_ON_NODE", root)
    count = os.cpu_count() or 1
    source = "os.cpu_count()"
    for path in _find_cgroup_files(root, "cpuset", ("cpuset.cpus.effective", "cpuset.cpus")):
        allowed = len(parse_cores(_read(path).strip()))
        if 0 < allowed < count:
            count = allowed
            source = f"cgroup cpuset {path.removeprefix(root.rstrip('/'))}"
    return _limit_by_quota(count, source, root)


def get_memory_limit(root: str = "/") -> int | None:
    """Return the bytes that this process's cgroup, or one around it, allows; None for no limit.

    Args:
        root: Where ``proc`` and ``sys`` are found; for tests.
    """
    limits = []
    for path in _find_cgroup_files(root, "memory", ("memory.max", "memory.limit_in_bytes")):
        text = _read(path).strip()
        if text.isdecimal():
            limits.append(int(text))
    return min(limits, default=None)


def parse_cores(text: str) -> set[int]:
    """Return the cores of ``0-7,104-111``; an empty set if it does not parse."""
    cores: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch("(0|[1-9][0-9]{0,4})(?:-(0|[1-9][0-9]{0,4}))?", part)
        if match is None:
            return set()
        low = int(match[1])
        high = int(match[2] or match[1])
        span = range(low, high + 1)
        if not span or not cores.isdisjoint(span):
            return set()
        cores.update(span)
    return cores


def _limit_by_quota(count: int, source: str, root: str) -> tuple[int, str]:
    """Return the count, or the smallest quota of this process's cgroup and those around it."""
    least = float(count)
    for path in _find_cgroup_files(root, "cpu", ("cpu.max", "cpu.cfs_quota_us")):
        quota = _read_quota(path)
        if quota is not None and quota < least:
            least = quota
            source = f"cgroup quota {quota:.4g} CPUs of {path.removeprefix(root.rstrip('/'))}"
    return max(1, int(least)), source


def _read_quota(path: str) -> float | None:
    """Return a cgroup's quota in CPUs; None if it has none."""
    # Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max: quota or max, period) and
    # Documentation/scheduler/sched-bwc.rst (v1: cpu.cfs_quota_us, -1 for none).
    words = _read(path).split()
    if path.endswith("cpu.cfs_quota_us"):
        words += _read(f"{os.path.dirname(path)}/cpu.cfs_period_us").split()
    if len(words) != 2:
        return None
    for word in words:
        if not re.fullmatch("[0-9]+", word) or not int(word):
            return None
    return int(words[0]) / int(words[1])


def _find_cgroup_files(root: str, controller: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yield those files that exist in this process's cgroup and in the cgroups around it."""
    mount = f"{root.rstrip('/')}/sys/fs/cgroup"
    for line in _read(f"{root.rstrip('/')}/proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            bases = [mount, f"{mount}/unified"]
        elif controller in controllers.split(","):
            bases = [f"{mount}/{controllers}", f"{mount}/{controller}"]
        else:
            continue
        for base in bases:
            for directory in _directories_above(base, path):
                for name in names:
                    if os.path.isfile(f"{directory}/{name}"):
                        yield f"{directory}/{name}"


def _directories_above(base: str, path: str) -> list[str]:
    """Return the directories from ``path`` below ``base`` up to ``base`` itself."""
    # A path with .. lies outside our cgroup namespace, and so outside the mount. A container may
    # see its own cgroup at the mount point while the path is the host's: what does not exist is
    # passed over.
    directories = [base]
    parts = path.strip("/").split("/")
    if ".." not in parts:
        for part in filter(None, parts):
            directories.insert(0, f"{directories[0]}/{part}")
    return directories


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""  # it does not exist, or we may not read it
