"""The packaged machines: each loads, and the facts that hurt when wrong are pinned."""

import os

import pytest

from ezpz_topo import known_machines
from ezpz_topo._machine import GENERIC, PACKAGED

MACHINES = known_machines({})


def test_all_of_them_are_there():
    assert sorted(MACHINES) == [
        "aurora", "crux", "frontier", "generic-pbs", "generic-slurm", "perlmutter", "polaris",
        "sirius", "sophia", "sunspot", "workstation",
    ]  # fmt: skip
    assert {f"{name}.toml" for name in MACHINES} == set(os.listdir(PACKAGED))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aurora", ("ALCF", "pbs", "pals", 10624, 12, "xpu", ("xccl", "ccl"))),
        ("sunspot", ("ALCF", "pbs", "pals", None, 12, "xpu", ("xccl", "ccl"))),
        ("polaris", ("ALCF", "pbs", "pals", 560, 4, "cuda", ("nccl",))),
        ("sirius", ("ALCF", "pbs", "pals", None, 4, "cuda", ("nccl",))),
        ("sophia", ("ALCF", "pbs", "openmpi", 24, 8, "cuda", ("nccl",))),
        ("crux", ("ALCF", "pbs", "pals", 256, 0, "cpu", ("gloo",))),
        ("perlmutter", ("NERSC", "slurm", "srun", 1792, 4, "cuda", ("nccl",))),
        ("frontier", ("OLCF", "slurm", "srun", 9856, 8, "cuda", ("nccl", "gloo"))),
        ("generic-pbs", ("any", "pbs", "mpiexec", None, None, "", ())),
        ("generic-slurm", ("any", "slurm", "srun", None, None, "", ())),
        ("workstation", ("any", "none", "mpiexec", None, None, "", ())),
    ],
)
def test_the_table(name, expected):
    machine = MACHINES[name]
    assert expected == (
        machine.site, machine.scheduler, machine.launcher, machine.nodes,
        machine.devices_per_node, machine.device_type, machine.backends,
    )  # fmt: skip
    assert machine.date >= "2026-08"
    assert machine.source


def test_each_scheduler_has_its_generic_machine():
    assert {MACHINES[name].scheduler: name for name in GENERIC.values()} == GENERIC


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("aurora", ["--envall", "--line-buffer"]),
        ("polaris", ["--envall"]),
        ("sophia", ["-x", "PATH", "-x", "LD_LIBRARY_PATH"]),
        ("crux", ["--envall", "--cpu-bind=depth"]),
        ("perlmutter", ["-c", "32"]),
        ("frontier", ["-c", "7", "--network=disable_rdzv_get"]),
        ("generic-slurm", ["-u"]),
        ("generic-pbs", []),
        ("workstation", []),
    ],
)
def test_launcher_flags(name, flags):
    assert list(MACHINES[name].launcher_flags) == flags


@pytest.mark.parametrize("name", ["aurora", "sunspot"])
def test_auroras_bind_lists(name):
    machine = MACHINES[name]
    assert ":".join(machine.cpu_bind["pytorch"]) == (
        "4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79"
    )
    assert ":".join(machine.cpu_bind["running-jobs"]) == (
        "1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100"
    )
    assert machine.default_cpu_bind == "pytorch"
    assert machine.reserved_cores == (0, 52, 104, 156)


def test_polaris_gpu_0_is_near_the_last_cores():
    assert MACHINES["polaris"].cpu_bind["numa"] == ("24-31", "16-23", "8-15", "0-7")
    assert "cpu_bind.numa" in MACHINES["polaris"].inferred


def test_frontiers_list_is_in_the_order_of_its_gcds():
    # OLCF's user guide: GPU 4 is near cores 0-7, 5: 8-15, 2: 16-23, 3: 24-31, 6: 32-39,
    # 7: 40-47, 0: 48-55, 1: 56-63; the first core of each is reserved.
    first_core = {4: 0, 5: 8, 2: 16, 3: 24, 6: 32, 7: 40, 0: 48, 1: 56}
    expected = [f"{first_core[gcd] + 1}-{first_core[gcd] + 7}" for gcd in range(8)]
    assert list(MACHINES["frontier"].cpu_bind["gcd"]) == expected
    assert "cpu_bind.gcd" in MACHINES["frontier"].inferred


def test_what_is_used_only_when_asked_for():
    assert MACHINES["aurora"].options["no-vni"].flags == ("--no-vni",)
    assert "DAOS" in MACHINES["aurora"].options["no-vni"].why
    assert len(MACHINES["aurora"].options["scale"].environment) == 7
    assert MACHINES["polaris"].options["depth"].flags == ("--cpu-bind=depth", "--depth=8")
    assert MACHINES["polaris"].options["nccl-ofi"].environment["NCCL_NET"] == "AWS Libfabric"
    assert MACHINES["frontier"].options["gloo"].backend == "gloo"
    assert all(option.why for machine in MACHINES.values() for option in machine.options.values())


def test_environment():
    assert MACHINES["aurora"].environment == {
        "CCL_PROCESS_LAUNCHER": "pmix", "CCL_ATL_TRANSPORT": "mpi", "CCL_KVS_MODE": "mpi",
        "FI_MR_CACHE_MONITOR": "userfaultfd", "TMPDIR": "/tmp",
    }  # fmt: skip
    assert MACHINES["frontier"].environment == {
        "NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3", "FI_MR_CACHE_MONITOR": "kdreg2",
        "FI_CXI_RDZV_PROTO": "alt_read",
    }  # fmt: skip
    # The plug-in can hang Megatron-DeepSpeed.
    assert MACHINES["polaris"].environment == {}


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("aurora", ".hsn.cm.aurora.alcf.anl.gov"), ("polaris", ".hsn.cm.polaris.alcf.anl.gov"),
     ("sunspot", ".hsn.cm.sunspot.alcf.anl.gov"), ("sirius", ".hsn.cm.sirius.alcf.anl.gov"),
     ("crux", ""), ("sophia", "")],
)  # fmt: skip
def test_high_speed_network(name, suffix):
    assert MACHINES[name].hsn_suffix == suffix


def test_modules_and_proxies():
    assert MACHINES["aurora"].modules == ("frameworks",)
    for name in ("polaris", "sirius", "sophia"):
        machine = MACHINES[name]
        assert machine.module_paths == ("/soft/modulefiles",)
        assert (machine.modules, machine.conda_environment) == (("conda",), "base")
    assert MACHINES["perlmutter"].modules == ("pytorch",)
    assert MACHINES["frontier"].proxy == "http://proxy.ccs.ornl.gov:3128"
    for machine in MACHINES.values():
        assert machine.site != "ALCF" or machine.proxy == "http://proxy.alcf.anl.gov:3128"


@pytest.mark.parametrize("name", ["sunspot", "sirius"])
def test_what_only_the_predecessor_says_is_marked(name):
    # every key: what is Aurora's or Polaris's own is the predecessor's word for these
    assert "*" in MACHINES[name].predecessor


def test_what_only_the_predecessor_says_of_others_is_marked():
    assert MACHINES["sophia"].predecessor == ("launcher", "launcher_flags")
    assert MACHINES["perlmutter"].predecessor == ("options.system-nccl",)
