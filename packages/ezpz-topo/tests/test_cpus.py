"""CPUs of this process and of this node, under every kind of cgroup."""

import os

import pytest

from ezpz_topo import InvalidVariableError
from ezpz_topo._devices import (
    cpu_count_with_source,
    cpus_per_node_with_source,
    get_cpu_count,
    get_cpus_per_node,
)

ALL = os.cpu_count() or 1
V2 = "0::/system.slice/job_7/step_0\n"
V1 = "4:memory:/slurm/job_7\n3:cpuset:/slurm/job_7\n2:cpu,cpuacct:/slurm/job_7\n"
SLURM = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "6"}

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system"
)


def tree(root, cgroup, **files):
    """Write /proc/self/cgroup, and files below /sys/fs/cgroup (``__`` stands for a slash)."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    return add(root, {name.replace("__", "/"): text for name, text in files.items()})


def add(root, files):
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@needs_affinity
def test_cpu_count_follows_the_affinity(tmp_path):
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpu_count_with_source(str(tmp_path)) == (1, "CPU affinity of this process")
    finally:
        os.sched_setaffinity(0, before)


@needs_affinity
def test_a_rank_bound_to_one_core_is_not_the_node(tmp_path):
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpus_per_node_with_source({}, root=str(tmp_path)) == (ALL, "os.cpu_count()")
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("50000 100000\n", 1), ("100000 100000\n", 1), ("150000 100000\n", 1)],
)
def test_a_quota_is_rounded_down_but_never_to_nothing(text, expected, tmp_path):
    root = tree(tmp_path, "0::/\n")
    add(tmp_path, {"cpu.max": text})
    assert get_cpu_count(root) == expected
    # 64 CPUs, so that the quota is what binds however few this computer has
    assert get_cpus_per_node({**SLURM, "SLURM_CPUS_ON_NODE": "64"}, root=root) == expected


@pytest.mark.parametrize("where", ["", "system.slice/", "system.slice/job_7/"])
def test_the_tightest_cgroup_around_us_binds(where, tmp_path):
    root = tree(tmp_path, V2)
    add(tmp_path, {
        "cpu.max": "max 100000\n", "system.slice/cpu.max": "1000000 100000\n",
        "system.slice/job_7/step_0/cpu.max": "800000 100000\n",
        f"{where}cpu.max": "250000 100000\n",
    })  # fmt: skip
    assert cpus_per_node_with_source(SLURM, root=root) == (
        2,
        f"cgroup quota 2.5 CPUs of /sys/fs/cgroup/{where}cpu.max",
    )


def test_a_cgroup_beside_ours_does_not_bind(tmp_path):
    root = tree(tmp_path, V2)
    add(tmp_path, {"system.slice/job_8/cpu.max": "100000 100000\n"})
    assert get_cpus_per_node(SLURM, root=root) == 6


@pytest.mark.parametrize(
    "text",
    ["", "max 100000\n", "max\n", "rubbish", "100000\n", "-1 100000\n", "0 100000\n",
     "100000 0\n", "1e5 100000\n", "٣ ٣\n", "\x00\xff"],
)  # fmt: skip
def test_a_file_that_sets_no_quota(text, tmp_path):
    root = tree(tmp_path, "0::/\n")
    add(tmp_path, {"cpu.max": text})
    assert get_cpus_per_node(SLURM, root=root) == 6


@pytest.mark.parametrize("cgroup", ["", "rubbish\n", "0\n", "::\n", "0::/../../outside\n", "0::\n"])
def test_a_proc_file_that_does_not_help(cgroup, tmp_path):
    root = tree(tmp_path, cgroup)
    assert get_cpus_per_node(SLURM, root=root) == 6


def test_a_path_outside_the_namespace_leaves_the_mount_point(tmp_path):
    root = tree(tmp_path, "0::/../../outside\n")
    add(tmp_path, {"cpu.max": "300000 100000\n"})
    assert get_cpus_per_node(SLURM, root=root) == 3


@pytest.mark.parametrize("mount", ["cpu,cpuacct", "cpu"])
def test_version_1(mount, tmp_path):
    root = tree(tmp_path, V1)
    add(tmp_path, {
        f"{mount}/slurm/job_7/cpu.cfs_quota_us": "400000\n",
        f"{mount}/slurm/job_7/cpu.cfs_period_us": "100000\n",
        f"{mount}/cpu.cfs_quota_us": "-1\n", f"{mount}/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    assert cpus_per_node_with_source(SLURM, root=root) == (
        4,
        f"cgroup quota 4 CPUs of /sys/fs/cgroup/{mount}/slurm/job_7/cpu.cfs_quota_us",
    )


def test_version_1_in_a_container_that_sees_its_cgroup_at_the_mount_point(tmp_path):
    root = tree(tmp_path, "2:cpu,cpuacct:/docker/0123abcd\n")
    add(tmp_path, {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"})
    assert get_cpus_per_node(SLURM, root=root) == 2


def test_version_1_without_its_period(tmp_path):
    root = tree(tmp_path, V1)
    add(tmp_path, {"cpu/cpu.cfs_quota_us": "200000\n"})
    assert get_cpus_per_node(SLURM, root=root) == 6


def test_slurm_tells_only_inside_its_job(tmp_path):
    root = str(tmp_path)
    assert cpus_per_node_with_source(SLURM, root=root) == (6, "SLURM_CPUS_ON_NODE")
    assert get_cpus_per_node({"SLURM_CPUS_ON_NODE": "6"}, root=root) == ALL


@pytest.mark.parametrize("bad", ["0", "-1", "4(x2)", "six", " 6", "1_0", "٣", "9999999999"])
def test_slurm_says_what_cannot_be(bad, tmp_path):
    with pytest.raises(InvalidVariableError, match="SLURM_CPUS_ON_NODE="):
        get_cpus_per_node({**SLURM, "SLURM_CPUS_ON_NODE": bad}, root=str(tmp_path))


def test_pbs_ncpus_is_the_threads_of_one_rank_not_the_node(tmp_path):
    # select=1:ncpus=64:mpiprocs=64:ompthreads=1
    env = {"PBS_JOBID": "1.pbs-0001", "NCPUS": "1", "OMP_NUM_THREADS": "1"}
    assert get_cpus_per_node(env, root=str(tmp_path)) == ALL


@pytest.mark.skipif(ALL < 2, reason="one CPU cannot be made fewer")
@pytest.mark.parametrize("version", [1, 2])
def test_a_jobs_cpuset_is_what_it_may_use(version, tmp_path):
    files = {
        1: {"cpuset/slurm/job_7/cpuset.cpus": "0\n", "cpuset/cpuset.cpus": "0-127\n"},
        2: {"system.slice/job_7/cpuset.cpus.effective": "3\n"},
    }
    root = tree(tmp_path, V1 if version == 1 else V2)
    add(tmp_path, files[version])
    count, source = cpus_per_node_with_source({}, root=root)
    assert count == 1
    assert source.startswith("cgroup cpuset /sys/fs/cgroup/")


@pytest.mark.parametrize("text", ["", "\n", "a-b", "0-", "3-1", "0,,1"])
def test_a_cpuset_that_says_nothing(text, tmp_path):
    root = tree(tmp_path, "0::/\n")
    add(tmp_path, {"cpuset.cpus.effective": text})
    assert get_cpus_per_node({}, root=root) == ALL
