"""CPUs: those this process may use, and those of this node that the job may use."""

from __future__ import annotations

import os
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
    """Return `get_cpu_count` and what told it."""
    if hasattr(os, "sched_getaffinity"):
        count, source = len(os.sched_getaffinity(0)), "CPU affinity of this process"
    else:
        count, source = os.cpu_count() or 1, "os.cpu_count()"
    return _within_quota(count, source, root)


def get_cpus_per_node(env: Mapping[str, str] | None = None, *, root: str = "/") -> int:
    """Return the number of logical CPUs of this node that the job may use, at least 1.

    Not this process's affinity: a rank bound to one core is one of many on its node.
    ``SLURM_CPUS_ON_NODE`` in a Slurm job, else every CPU of the node, less what the cgroup's
    cpuset and quota withhold. PBS's ``NCPUS`` is not read: it is the threads of one MPI
    process, ``ompthreads`` where the job asked for them (OpenPBS, start_exec.c).

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
    """Return `get_cpus_per_node` and what told it.

    Raises:
        InvalidVariableError: As `get_cpus_per_node`.
    """
    env = os.environ if env is None else env
    text = env.get("SLURM_CPUS_ON_NODE", "")
    if text and env.get("SLURM_JOB_ID"):
        if not (text.isascii() and text.isdigit()) or not 0 < len(text) <= 9 or not int(text):
            raise InvalidVariableError(
                f"SLURM_CPUS_ON_NODE={text[:40]!r}; expected a whole number from 1; "
                "unset SLURM_CPUS_ON_NODE, or start inside the Slurm job"
            )
        return _within_quota(int(text), "SLURM_CPUS_ON_NODE", root)
    count, source = os.cpu_count() or 1, "os.cpu_count()"
    for path in _cgroup_files(root, "cpuset", ("cpuset.cpus.effective", "cpuset.cpus")):
        allowed = _cpus_in_set(_read(path))
        if 0 < allowed < count:
            count, source = allowed, f"cgroup cpuset {_shown(path, root)}"
    return _within_quota(count, source, root)


def _within_quota(count: int, source: str, root: str) -> tuple[int, str]:
    found = [(quota, path) for path, quota in _quotas(root)]
    if not found:
        return count, source
    quota, path = min(found)
    if quota >= count:
        return count, source
    return max(1, int(quota)), f"cgroup quota {quota:.4g} CPUs of {_shown(path, root)}"


def _quotas(root: str) -> Iterator[tuple[str, float]]:
    """Yield the quota, in CPUs, of this process's cgroup and of each around it that has one.

    Linux, Documentation/admin-guide/cgroup-v2.rst (``cpu.max``: quota or max, period) and
    Documentation/scheduler/sched-bwc.rst (v1: ``cpu.cfs_quota_us``, -1 for none).
    """
    for path in _cgroup_files(root, "cpu", ("cpu.max", "cpu.cfs_quota_us")):
        words = _read(path).split()
        if path.endswith("cpu.cfs_quota_us"):
            words += _read(f"{os.path.dirname(path)}/cpu.cfs_period_us").split()
        if len(words) == 2 and all(w.isascii() and w.isdigit() and int(w) for w in words):
            yield path, int(words[0]) / int(words[1])


def _cgroup_files(root: str, controller: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yield those files that exist in this process's cgroup and in the cgroups around it.

    A container may see its own cgroup at the mount point while /proc/self/cgroup names the
    host's path below it, so what does not exist is passed over, up to the mount point.
    """
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
        # A path with .. lies outside our cgroup namespace, and so outside the mount.
        parts = [] if ".." in path.split("/") else path.strip("/").split("/")
        for base in bases:
            for depth in range(len(parts), -1, -1):
                directory = "/".join([base, *filter(None, parts[:depth])])
                for name in names:
                    if os.path.isfile(f"{directory}/{name}"):
                        yield f"{directory}/{name}"


def _cpus_in_set(text: str) -> int:
    """Count the CPUs of a list such as ``0-3,8``; 0 where it says nothing that parses."""
    count = 0
    for item in text.strip().split(","):
        low, dash, high = item.partition("-")
        high = high if dash else low
        if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit()):
            return 0
        count += max(0, int(high) - int(low) + 1)
    return count


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        # No cgroups, or none for us: nothing is withheld that we could know of.
        return ""


def _shown(path: str, root: str) -> str:
    return path.removeprefix(root.rstrip("/"))
