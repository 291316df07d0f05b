"""CPUs and accelerators: every source of a count, in the order of trust, and what misleads."""

import os

import pytest

from ezpz_topo import (
    InvalidVariableError,
    get_accelerators,
    get_cpu_count,
    get_cpus_per_node,
    get_memory_limit,
)
from ezpz_topo._cpus import cpu_count_with_source, cpus_per_node_with_source

# CPUs of this process and of this node, under every kind of cgroup.

ALL = os.cpu_count() or 1
V2 = "0::/system.slice/job_7/step_0\n"
V1 = "4:memory:/slurm/job_7\n3:cpuset:/slurm/job_7\n2:cpu,cpuacct:/slurm/job_7\n"
SLURM = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "6"}


def tree(root, cgroup, files=()):
    """Write /proc/self/cgroup, and files below /sys/fs/cgroup; return their root."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in dict(files).items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity on this system")
def test_the_affinity_of_a_rank_is_not_the_node(tmp_path):
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cpu_count_with_source(str(tmp_path)) == (1, "CPU affinity of this process")
        assert cpus_per_node_with_source({}, root=str(tmp_path)) == (ALL, "os.cpu_count()")
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("where", ["", "system.slice/", "system.slice/job_7/"])
def test_the_tightest_cgroup_around_us_binds(where, tmp_path):
    root = tree(tmp_path, V2, {
        "cpu.max": "max 100000\n", "system.slice/cpu.max": "1000000 100000\n",
        "system.slice/job_7/step_0/cpu.max": "800000 100000\n",
        "system.slice/job_8/cpu.max": "100000 100000\n",  # beside ours
        f"{where}cpu.max": "250000 100000\n",
    })  # fmt: skip
    assert cpus_per_node_with_source(SLURM, root=root) == (
        2,
        f"cgroup quota 2.5 CPUs of /sys/fs/cgroup/{where}cpu.max",
    )


@pytest.mark.parametrize(("cgroup", "files", "cpus"), [
    *(("0::/\n", {"cpu.max": text}, 6)
      for text in ("max 100000\n", "rubbish", "-1 100000\n", "100000 0\n", "٣ ٣\n", "\x00\xff")),
    *((text, {}, 6) for text in ("", "rubbish\n", "0::/../../out\n")),
    # rounded down, but never to nothing
    *(("0::/\n", {"cpu.max": f"{quota} 100000\n"}, 1) for quota in (50_000, 150_000)),
    # a path outside the namespace leaves the mount point
    ("0::/../../outside\n", {"cpu.max": "300000 100000\n"}, 3),
    # version 1 in a container that sees its cgroup at the mount point
    ("2:cpu,cpuacct:/docker/0123abcd\n",
     {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    (V1, {"cpu/cpu.cfs_quota_us": "200000\n"}, 6),  # without its period
    *((V1, {f"{mount}/slurm/job_7/cpu.cfs_quota_us": "400000\n",
            f"{mount}/slurm/job_7/cpu.cfs_period_us": "100000\n",
            f"{mount}/cpu.cfs_quota_us": "-1\n", f"{mount}/cpu.cfs_period_us": "100000\n"}, 4)
      for mount in ("cpu,cpuacct", "cpu")),
])  # fmt: skip
def test_files_of_cgroups(cgroup, files, cpus, tmp_path):
    root = tree(tmp_path, cgroup, files)
    assert get_cpus_per_node(SLURM, root=root) == cpus
    assert cpus > 1 or get_cpu_count(root) == 1


@pytest.mark.parametrize(("env", "expected"), [
    (SLURM, (6, "SLURM_CPUS_ON_NODE")),
    ({"SLURM_CPUS_ON_NODE": "6"}, (ALL, "os.cpu_count()")),  # outside its job
    # PBS, select=1:ncpus=64:mpiprocs=64:ompthreads=1: the threads of one rank, not the node
    ({"PBS_JOBID": "1.x", "NCPUS": "1", "OMP_NUM_THREADS": "1"}, (ALL, "os.cpu_count()")),
])  # fmt: skip
def test_what_the_scheduler_tells(env, expected, tmp_path):
    assert cpus_per_node_with_source(env, root=str(tmp_path)) == expected


@pytest.mark.parametrize("bad", ["0", "4(x2)", "9999999999"])
def test_slurm_says_what_cannot_be(bad, tmp_path):
    with pytest.raises(InvalidVariableError, match="SLURM_CPUS_ON_NODE="):
        get_cpus_per_node({**SLURM, "SLURM_CPUS_ON_NODE": bad}, root=str(tmp_path))


@pytest.mark.skipif(ALL < 2, reason="one CPU cannot be made fewer")
@pytest.mark.parametrize(
    ("cgroup", "files"),
    [(V1, {"cpuset/slurm/job_7/cpuset.cpus": "0\n", "cpuset/cpuset.cpus": "0-127\n"}),
     (V2, {"system.slice/job_7/cpuset.cpus.effective": "3\n"})],
)  # fmt: skip
def test_a_jobs_cpuset_is_what_it_may_use(cgroup, files, tmp_path):
    count, source = cpus_per_node_with_source({}, root=tree(tmp_path, cgroup, files))
    assert count == 1
    assert source.startswith("cgroup cpuset /sys/fs/cgroup/")


@pytest.mark.parametrize("text", ["", "a-b", "3-1", "0,,1"])
def test_a_cpuset_that_says_nothing(text, tmp_path):
    root = tree(tmp_path, "0::/\n", {"cpuset.cpus.effective": text})
    assert get_cpus_per_node({}, root=root) == ALL


@pytest.mark.parametrize(("cgroup", "files", "limit"), [
    # version 2: the job's limit binds the step's group, the smallest of several wins
    (V2, {"system.slice/job_7/step_0/memory.max": "max\n", "system.slice/job_7/memory.max": "64\n",
          "system.slice/memory.max": "128\n"}, 64),
    # version 1 beside an empty version 2
    ("9:name=systemd:/\n4:cpu,memory:/job/7\n0::/\n",
     {"memory/job/7/memory.limit_in_bytes": "64\n",
      "memory/memory.limit_in_bytes": "9223372036854771712\n"}, 64),
    # a container that sees its own group as the root, under the host's path
    ("0::/kubepods/pod1/c2\n", {"memory.max": "64\n"}, 64),
    ("0::/\n", {"memory.max": "max\n"}, None),
])  # fmt: skip
def test_limits_of_memory(cgroup, files, limit, tmp_path):
    assert get_memory_limit(tree(tmp_path, cgroup, files)) == limit


# What the kernel shows, as trees of /dev and /sys; AMD's and Intel's are from documentation.

PVC = {"DRIVER": "i915", "PCI_CLASS": "38000", "PCI_ID": "8086:0BD5"}
LAPTOP = {"DRIVER": "i915", "PCI_CLASS": "30000", "PCI_ID": "8086:46A6"}
XE_TILES = ("tile0/gt0", "tile0/gt1", "tile1/gt2", "drm/card0")  # a media GT is no tile
MACHINE = ("xpu", 12, "machines/aurora.toml")
NO_TOOLS = {"PATH": "/nonexistent"}


@pytest.fixture
def bare(tmp_path):
    """A host with a /dev, and no accelerator in it."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/null").touch()
    return tmp_path


def nvidia(root, count):
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps", *(f"nvidia{n}" for n in range(count))):
        (root / "dev" / name).touch()
    return root


def amd(root, *properties, device=True):
    if device:
        (root / "dev/kfd").touch()
    for number, text in enumerate(properties):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(text)
    return root


def mi250(root, count):
    return amd(root, "simd_count 0\n", *["simd_count 304\n"] * count)


def card(root, facts=PVC, *, number=0, below=(), address=None, given=True):
    device = root / f"sys/class/drm/renderD{128 + number}/device"
    lines = {**facts, "PCI_SLOT_NAME": address or f"0000:{number + 18}:00.0"}
    for folder in below:
        (device / folder).mkdir(parents=True)
    device.mkdir(parents=True, exist_ok=True)
    (device / "uevent").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    (root / "dev/dri").mkdir(parents=True, exist_ok=True)
    if given:
        (root / f"dev/dri/renderD{128 + number}").touch()
    return root


def intel(root, cards):
    for number in range(cards):
        gts = [f"drm/card{number}/gt/gt{tile}" for tile in range(2)]
        card(root, number=number, below=(*gts, f"drm/renderD{128 + number}"))
    return root


def look(env, root, **options):
    return get_accelerators({**NO_TOOLS, **env}, root=str(root), **options)


def found(env, root, **options):
    devices = look(env, root, **options)
    return devices.device_type, devices.count


@pytest.mark.parametrize(("make", "expected"), [
    (lambda root: root, ("cpu", 0)),
    (lambda root: nvidia(root, 2), ("cuda", 2)),
    (lambda root: mi250(root, 2), ("cuda", 2)),
    # the host's KFD in a container without its device, and nodes that are no GPUs
    (lambda root: amd(root, "simd_count 304\n", device=False), ("cpu", 0)),
    (lambda root: amd(root, "", "simd_count\n", "cpu_cores_count 64\n"), ("cpu", 0)),
    (lambda root: intel(root, 1), ("xpu", 2)),
    (lambda root: card(root, below=XE_TILES), ("xpu", 2)),
    (lambda root: card(root, LAPTOP, below=["tile0"]), ("xpu", 1)),  # as a discrete Arc
    # A laptop's graphics, also as a second card, whose class is a data-centre card's.
    (lambda root: card(root, LAPTOP, address="0000:00:02.0"), ("cpu", 0)),
    (lambda root: card(root, PVC, address="0000:00:02.0"), ("cpu", 0)),
    (lambda root: card(root, {**PVC, "PCI_ID": "1A03:2000"}), ("cpu", 0)),  # a console
    (lambda root: card(root, {**PVC, "PCI_CLASS": "120000"}), ("cpu", 0)),  # no GPU
    (lambda root: card(root, {}), ("cpu", 0)),
    # A container sees the host's sysfs but not its devices.
    (lambda root: card(card(root, below=["tile0"]), number=1, given=False), ("xpu", 1)),
    # nvidia before amd before intel
    (lambda root: intel(mi250(nvidia(root, 1), 2), 3), ("cuda", 1)),
], ids=range(15))  # fmt: skip
def test_what_the_kernel_shows(make, expected, bare):
    devices = look({}, make(bare))
    assert (devices.device_type, devices.count) == expected
    assert devices.source


def test_a_card_without_tiles_in_sysfs_is_one_device_and_says_so(bare):
    devices = look({}, card(bare))
    assert devices.count == 1
    assert devices.notes == ("sysfs shows no tiles of 0000:18:00.0: counted as one device each",)


def test_nodes_outside_the_jobs_cgroup_are_passed_over(bare):
    (mi250(bare, 2) / "sys/class/kfd/kfd/topology/nodes/3").mkdir()
    assert look({}, bare).source == "2 GPUs in /sys/class/kfd (ROCm)"


# Variables.


@pytest.mark.parametrize(("env", "expected"), [
    ({"CUDA_VISIBLE_DEVICES": "0, 1,"}, ("cuda", 2)),
    ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, ("cuda", 1)),
    ({"CUDA_VISIBLE_DEVICES": ""}, ("cpu", 0)),
    ({"CUDA_VISIBLE_DEVICES": "void"}, ("cpu", 0)),
    ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-1d2b"}, ("cuda", 2)),
    ({"TORCH_DEVICE": "xpu", "CUDA_VISIBLE_DEVICES": "0,1"}, ("xpu", 0)),
    ({"TORCH_DEVICE": "cuda:1", "CUDA_VISIBLE_DEVICES": "0,1"}, ("cuda", 2)),
    ({"TORCH_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}, ("cpu", 0)),
])  # fmt: skip
def test_variables_decide(env, expected, bare):
    assert found(env, nvidia(bare, 4)) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [("TORCH_DEVICE", "gpu", "='gpu'; expected one of x"),
     ("CUDA_VISIBLE_DEVICES", "1,0,1", "names a device twice")],
)  # fmt: skip
def test_variables_that_cannot_be(name, text, expected, tmp_path):
    with pytest.raises(InvalidVariableError, match=f"{name}.*{expected}"):
        found({name: text}, tmp_path)


# Variables against what the host has.


@pytest.mark.parametrize(("env", "make", "fallback", "expected"), [
    ({"CUDA_VISIBLE_DEVICES": "0,7,1"}, lambda root: nvidia(root, 4), None, ("cuda", 1)),
    ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, lambda root: nvidia(root, 1), None, ("cuda", 1)),
    ({"CUDA_VISIBLE_DEVICES": "0"}, lambda root: intel(root, 6), None, ("xpu", 12)),
    ({}, lambda root: nvidia(root, 2), MACHINE, ("cuda", 2)),
    ({}, lambda root: root, ("cpu", 0, "machines/crux.toml"), ("cpu", 0)),
    ({"TORCH_DEVICE": "cuda"}, lambda root: root, MACHINE, ("cuda", 0)),
    ({"TORCH_DEVICE": "xpu"}, lambda root: root, MACHINE, ("xpu", 12)),
], ids=range(7))  # fmt: skip
def test_what_is_left_of_what_the_host_has(bare, env, make, fallback, expected):
    assert found(env, make(bare), fallback=fallback) == expected


@pytest.mark.parametrize(("gpus", "visible", "count", "source", "note"), [
    (2, "0,1,2", 2, "=0,1,2", "stops at '2', because 2 devices are here"),
    (4, "0,-1", 1, "=0,-1", ""),  # that is meant
    # indices of the host in a container with two devices
    (2, "2,3", 0, "='2,3' hides every device of 2", ""),
    # leftovers where there is no GPU, or a driver without one
    (None, "0", 0, "no accelerator", "set aside: CUDA_VISIBLE_DEVICES=0"),
    (0, "0", 0, "no accelerator", "a driver is there"),
    (1, "MIG-1", 1, "=MIG-1", ""),
    (1, "MIG-1,MIG-2,GPU-3", 1, "=MIG-1,MIG-2,GPU-3", "MIG among them"),
])  # fmt: skip
def test_what_is_said_of_a_variable(bare, *, gpus, visible, count, source, note):
    devices = look({"CUDA_VISIBLE_DEVICES": visible}, bare if gpus is None else nvidia(bare, gpus))
    assert (devices.device_type, devices.count) == ("cuda" if count else "cpu", count)
    assert source in devices.source
    assert note in "".join(devices.notes) if note else devices.notes == ()


# ROCm.


@pytest.mark.parametrize(("env", "expected"), [
    ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "0,1"}, 2),
    ({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1,2"}, 2),
    ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 1),
    # Slurm without AutoDetect sets all of them to the same list.
    ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, 0),
    # OpenCL's, whatever stands beside it
    ({"GPU_DEVICE_ORDINAL": "0"}, 8),
    ({"ROCR_VISIBLE_DEVICES": ""}, 0),
    ({"ROCR_VISIBLE_DEVICES": "0,GPU-4b2c1a9f"}, 2),
])  # fmt: skip
def test_hip_counts_within_what_rocr_left(env, expected, bare):
    assert look(env, mi250(bare, 8)).count == expected


# Level Zero.


@pytest.mark.parametrize(("hierarchy", "mask", "expected"), [
    ("", None, 12),
    ("COMBINED", None, 12),
    ("COMPOSITE", None, 6),
    ("composite", None, 12),  # the driver takes what it does not know for the default
    ("FLAT", "0, 12,11,0", 2),
    ("FLAT", "12", 0),
    ("FLAT", "", 12),
    ("FLAT", "default", 12),
    ("COMPOSITE", "0.0,0.1,6", 1),
    ("COMPOSITE", "0.0,1.1,2", 3),
])  # fmt: skip
def test_affinity_mask_in_each_hierarchy(hierarchy, mask, expected, bare):
    env = {"ZE_FLAT_DEVICE_HIERARCHY": hierarchy}
    if mask is not None:
        env["ZE_AFFINITY_MASK"] = mask
    assert look(env, intel(bare, 6)).count == expected


@pytest.mark.parametrize(("hierarchy", "mask", "expected"), [
    *(("COMPOSITE", mask, "cards and their tiles") for mask in ("0,,1", "0.1.2.3", "-1", "٣")),
    *((flat, "0.1", r"'0\.1' in it; expected tile") for flat in ("", "COMBINED")),
])  # fmt: skip
def test_a_mask_that_does_not_parse(hierarchy, mask, expected, bare):
    env = {"ZE_AFFINITY_MASK": mask, "ZE_FLAT_DEVICE_HIERARCHY": hierarchy}
    with pytest.raises(InvalidVariableError, match=f"ZE_AFFINITY_MASK=.*{expected}"):
        look(env, intel(bare, 6))


def test_a_bad_mask_on_a_host_without_intel_cards_is_only_noted(bare):
    assert "set aside: ZE_AFFINITY_MASK=0.1" in look({"ZE_AFFINITY_MASK": "0.1"}, bare).notes[0]
    assert found({"ZE_AFFINITY_MASK": "0.1"}, nvidia(bare, 2)) == ("cuda", 2)


# Tools, then /dev.


@pytest.fixture
def fake(bare, command):
    """Put an executable on a PATH of its own, which prints a text."""

    def make(name, text, *, status=0, then=""):
        (bare / f"{name}.out").write_text(text)
        answer = f"/bin/cat {bare}/{name}.out"
        command(name, f'echo "$@" >> {bare}/{name}.argv\n{answer}\n{then}\nexit {status}')
        return {"PATH": str(bare)}

    return make


# As documentation shows what the tools print.
A100 = "GPU {}: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a7{})\n"
NVIDIA = A100.format(0, 0) + A100.format(1, 1)
NVIDIA_MIG = f"""{A100.format(0, 0)}  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef)
  MIG 1c.3g.20gb  Device  1: (UUID: MIG-cba663e8)
"""
AMD = "".join(f"GPU: {n}\n    BDF: 0000:2{n}:00.0\n    UUID: 0{n}ff74a1-0000\n" for n in (0, 1))
ROCM = """
============================ ROCm System Management Interface ============================
=========================================== ID ===========================================
GPU[0]\t\t: Device Name: \t\tAMD Instinct MI300A
GPU[0]\t\t: Device ID: \t\t0x74a0
GPU[1]\t\t: Device Name: \t\tAMD Instinct MI300A
GPU[1]\t\t: Device ID: \t\tN/A
================================== End of ROCm SMI Log ===================================
"""
FAILED = "Failed to initialize NVML: Driver/library version mismatch"
DEV = "4 x /dev/nvidia<N>"
KFD = "4 GPUs in /sys/class/kfd (ROCm)"


@pytest.mark.parametrize(("make", "tool", "text", "status", "count", "source", "note"), [
    # /dev of the host is bound into a container that may use some devices
    (nvidia, "nvidia-smi", NVIDIA, 0, 2, "nvidia-smi -L", f"set aside: {DEV}, because nvidia-smi"),
    (nvidia, "nvidia-smi", NVIDIA_MIG, 0, 1, "nvidia-smi -L", "2 MIG devices on 1 GPUs"),
    # a job that was given no GPU on a node that has some
    (nvidia, "nvidia-smi", "No devices found.", 0, 0, "nvidia-smi -L lists no device", "lists 0"),
    (mi250, "amd-smi", AMD, 0, 2, "amd-smi list", f"set aside: {KFD}"),
    (mi250, "rocm-smi", ROCM, 0, 2, "rocm-smi --showid", f"set aside: {KFD}"),
    # an unknown output is a failure and not a zero
    (nvidia, "nvidia-smi", "\n  other\nwords\n", 0, 4, DEV, "nvidia-smi -L said 'other', not"),
    (mi250, "amd-smi", "\n  other\nwords\n", 0, 4, KFD, "amd-smi list said 'other', not"),
    (mi250, "rocm-smi", "\n  other\nwords\n", 0, 4, KFD, "rocm-smi --showid said 'other', not"),
    (nvidia, "nvidia-smi", f"\n {FAILED}\nsecond", 18, 4, DEV,
     f"nvidia-smi -L failed with exit status 18: {FAILED}; counted instead: {DEV}"),
])  # fmt: skip
def test_a_vendors_tool_knows_better_than_the_kernel(
    *, bare, fake, make, tool, text, status, count, source, note
):
    env = fake(tool, text, status=status)
    devices = look(env, make(bare, 4), fallback=("cuda", 4, "machines/polaris.toml"))
    assert (devices.device_type, devices.count) == ("cuda" if count else "cpu", count)
    assert devices.source == source
    assert note in "; ".join(devices.notes)


def test_a_tool_that_hangs_or_does_not_start_is_told(*, fake, bare, monkeypatch):
    monkeypatch.setattr("ezpz_topo._devices._TIME_LIMIT", 0.3)
    hanging = look(fake("amd-smi", "", then="/bin/sleep 60"), mi250(bare, 2))
    assert hanging.count == 2
    assert hanging.notes[0].endswith(" failed: no answer in 0.3 s")
    (bare / "amd-smi").write_text("#!/nonexistent/sh\n")
    assert " failed: No such file" in look({"PATH": str(bare)}, bare).notes[0]


def test_rocm_smi_where_amd_smi_fails(fake, bare):
    fake("amd-smi", "AMDSMI_STATUS_INIT_ERROR\n", status=1)
    devices = look(fake("rocm-smi", ROCM), mi250(bare, 2))
    assert (devices.count, devices.source) == (2, "rocm-smi --showid")
    assert "AMDSMI_STATUS_INIT_ERROR" in devices.notes[0]


@pytest.mark.parametrize(("gpus", "env", "options", "expected"), [
    (4, {"CUDA_VISIBLE_DEVICES": "0,1"}, {}, ("cuda", 2)),  # a variable tells
    (4, {}, {"tools": False}, ("cuda", 4)),  # told so
    (None, {}, {}, ("cpu", 0)),  # no driver
])  # fmt: skip
def test_where_no_tool_is_started(*, bare, fake, gpus, env, options, expected):
    for name in ("nvidia-smi", "amd-smi", "rocm-smi"):
        path = fake(name, "", status=1)
    root = bare if gpus is None else nvidia(bare, gpus)
    assert found({**path, **env}, root, **options) == expected
    assert not list(bare.glob("*.argv"))


def test_windows_linux_shows_one_file_for_all_gpus(bare, fake):
    (bare / "dev/dxg").touch()
    assert found({}, bare) == ("cpu", 0)
    assert "a driver is there" in look({}, bare).notes[0]
    env = fake("nvidia-smi", "GPU 0: NVIDIA RTX A2000 (UUID: GPU-1)\n")
    assert found(env, bare) == ("cuda", 1)
    assert found({**env, "CUDA_VISIBLE_DEVICES": "0,1"}, bare) == ("cuda", 1)
    assert found({"CUDA_VISIBLE_DEVICES": "0"}, bare) == ("cuda", 1)


def test_the_vendor_whose_devices_are_left_is_taken(bare):
    intel(mi250(nvidia(bare, 1), 2), 3)
    assert look({"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0,1"}, bare).count == 2
    assert found({"TORCH_DEVICE": "xpu"}, bare) == ("xpu", 6)


# What the caller knows of the machine.


def test_a_login_node_answers_for_its_machine(bare):
    devices = look({}, bare, fallback=MACHINE)
    assert (devices.device_type, devices.count, devices.source) == MACHINE
    assert "shows no accelerator of its own" in devices.notes[-1]
    leftover = look({"CUDA_VISIBLE_DEVICES": "0"}, bare, fallback=MACHINE)
    assert (leftover.count, len(leftover.notes)) == (12, 2)


@pytest.mark.parametrize(
    ("name", "value"), [("CUDA_VISIBLE_DEVICES", "NoDevFiles"), ("ROCR_VISIBLE_DEVICES", "")]
)
def test_the_machine_is_not_asked_where_a_variable_hides_every_device(name, value, bare):
    devices = look({name: value}, bare, fallback=MACHINE)
    assert (devices.device_type, devices.count) == ("cpu", 0)
    assert devices.source == f"{name}={value!r} hides every device"
