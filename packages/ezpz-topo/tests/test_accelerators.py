"""Every source of a device count, in the order of trust, and every variable that misleads."""

import pytest

from ezpz_topo import InvalidVariableError, get_accelerators

MACHINE = ("xpu", 12, "machines/aurora.toml")
NO_TOOLS = {"PATH": "/nonexistent"}


def found(env, root, **options):
    devices = get_accelerators({**NO_TOOLS, **env}, root=str(root), **options)
    return devices.device_type, devices.count


def look(env, root, **options):
    return get_accelerators({**NO_TOOLS, **env}, root=str(root), **options)


@pytest.fixture
def bare(tmp_path):
    """A host with a /dev, and no accelerator in it."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/null").touch()
    return tmp_path


def nvidia(root, count):
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{n}" for n in range(count))):
        (root / "dev" / name).touch()
    return root


def amd(root, count):
    (root / "dev/kfd").touch()
    for node in range(count + 1):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"simd_count {304 if node else 0}\n")
    return root


def intel(root, cards, tiles=2):
    for card in range(cards):
        name = f"renderD{128 + card}"
        device = root / f"sys/class/drm/{name}/device"
        device.mkdir(parents=True)
        (device / "uevent").write_text(
            f"DRIVER=i915\nPCI_CLASS=38000\nPCI_ID=8086:0BD5\nPCI_SLOT_NAME=0000:{card + 24}:00.0\n"
        )
        for tile in range(tiles):
            (device / f"drm/card{card}/gt/gt{tile}").mkdir(parents=True)
        (root / "dev/dri").mkdir(exist_ok=True)
        (root / f"dev/dri/{name}").touch()
    return root


def fake(root, name, script):
    """Put an executable called ``name`` on a PATH of its own."""
    path = root / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": str(path.parent)}


# Variables where there is no /dev to compare them with.


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ("cuda", 4)),
        ({"CUDA_VISIBLE_DEVICES": "2"}, ("cuda", 1)),
        ({"CUDA_VISIBLE_DEVICES": "0, 1"}, ("cuda", 2)),
        ({"CUDA_VISIBLE_DEVICES": "0,1,"}, ("cuda", 2)),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, ("cuda", 1)),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ("cpu", 0)),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("cpu", 0)),
        ({"CUDA_VISIBLE_DEVICES": "void"}, ("cpu", 0)),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ("cpu", 0)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-1d2b"}, ("cuda", 2)),
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, ("cuda", 2)),
        ({"ROCR_VISIBLE_DEVICES": "0,GPU-4b2c1a9f"}, ("cuda", 2)),
        ({"ZE_AFFINITY_MASK": "0,1,2"}, ("xpu", 3)),
        ({"CUDA_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": "0,1"}, ("xpu", 2)),
        ({"TORCH_DEVICE": "xpu", "CUDA_VISIBLE_DEVICES": "0,1"}, ("xpu", 0)),
        ({"TORCH_DEVICE": "cuda:1", "CUDA_VISIBLE_DEVICES": "0,1"}, ("cuda", 2)),
        ({"TORCH_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}, ("cpu", 0)),
    ],
)
def test_variables_decide(env, expected, tmp_path):
    assert found(env, tmp_path) == expected


@pytest.mark.parametrize("bogus", ["gpu", "CPU", "meta"])
def test_a_device_type_that_does_not_exist(bogus, tmp_path):
    with pytest.raises(InvalidVariableError, match=f"TORCH_DEVICE='{bogus}'; expected one of xpu"):
        found({"TORCH_DEVICE": bogus}, tmp_path)


@pytest.mark.parametrize("twice", ["0,0", "1,0,1", "GPU-8932,GPU-8932"])
def test_a_device_named_twice(twice, tmp_path):
    with pytest.raises(InvalidVariableError, match="names a device twice"):
        found({"CUDA_VISIBLE_DEVICES": twice}, tmp_path)


# Variables against what the host has.


def test_a_variable_is_cut_where_cuda_stops(bare):
    devices = look({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, nvidia(bare, 2))
    assert (devices.count, devices.source) == (2, "CUDA_VISIBLE_DEVICES=0,1,2,3")
    assert "stops at '2', because 2 devices are here" in devices.notes[0]


def test_cuda_stops_at_the_first_index_it_has_not(bare):
    assert found({"CUDA_VISIBLE_DEVICES": "0,7,1"}, nvidia(bare, 4)) == ("cuda", 1)


def test_a_minus_one_is_meant_and_needs_no_note(bare):
    assert look({"CUDA_VISIBLE_DEVICES": "0,-1"}, nvidia(bare, 4)).notes == ()


def test_more_uuids_than_devices(bare):
    env = {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2,GPU-3"}
    assert found(env, nvidia(bare, 2)) == ("cuda", 2)


def test_indices_of_the_host_in_a_container_with_two_devices(bare):
    devices = look({"CUDA_VISIBLE_DEVICES": "2,3"}, nvidia(bare, 2), fallback=MACHINE)
    assert (devices.device_type, devices.count) == ("cpu", 0)
    assert devices.source == "CUDA_VISIBLE_DEVICES='2,3' hides every device of 2"


def test_leftover_variable_on_a_host_without_a_gpu(bare):
    devices = look({"CUDA_VISIBLE_DEVICES": "0"}, bare)
    assert (devices.device_type, devices.count) == ("cpu", 0)
    assert "no accelerator" in devices.source
    assert "set aside: CUDA_VISIBLE_DEVICES=0" in devices.notes[0]


def test_leftover_variable_where_a_driver_has_no_device(bare):
    devices = look({"CUDA_VISIBLE_DEVICES": "0"}, nvidia(bare, 0))
    assert (devices.device_type, devices.count) == ("cpu", 0)
    assert any("a driver is there" in note for note in devices.notes)


def test_leftover_cuda_variable_beside_intel_cards(bare):
    assert found({"CUDA_VISIBLE_DEVICES": "0"}, intel(bare, 6)) == ("xpu", 12)


@pytest.mark.parametrize("mask", ["MIG-1,MIG-2", "MIG-1,MIG-2,GPU-3"])
def test_several_mig_devices_are_one_for_a_process(mask, bare):
    devices = look({"CUDA_VISIBLE_DEVICES": mask}, nvidia(bare, 1))
    assert devices.count == 1
    assert "MIG" in devices.notes[-1]


def test_one_mig_device(bare):
    devices = look({"CUDA_VISIBLE_DEVICES": "MIG-1"}, nvidia(bare, 1))
    assert (devices.count, devices.notes) == (1, ())


# ROCm.


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"ROCR_VISIBLE_DEVICES": "4,5,6,7", "HIP_VISIBLE_DEVICES": "0,1"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "4,5"}, 0),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1,2"}, 2),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 3),
        # Slurm without AutoDetect sets all of them to the same list.
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, 0),
        # OpenCL's, whatever stands beside it
        ({"GPU_DEVICE_ORDINAL": "0"}, 8),
        ({"ROCR_VISIBLE_DEVICES": ""}, 0),
    ],
)
def test_hip_counts_within_what_rocr_left(env, expected, bare):
    assert look(env, amd(bare, 8)).count == expected


def test_amd_nodes_with_simds_are_gpus(bare):
    amd(bare, 2)
    (bare / "sys/class/kfd/kfd/topology/nodes/3").mkdir()  # outside the job's cgroup
    devices = look({}, bare)
    assert (devices.device_type, devices.count) == ("cuda", 2)
    assert devices.source == "2 GPUs in /sys/class/kfd (ROCm)"


# Level Zero.


@pytest.mark.parametrize(
    ("hierarchy", "mask", "expected"),
    [
        ("", None, 12),
        ("FLAT", None, 12),
        ("COMBINED", None, 12),
        ("COMPOSITE", None, 6),
        ("flat", None, 12),  # the driver takes what it does not know for the default
        ("FLAT", "0,1,11", 3),
        ("FLAT", "0, 12", 1),
        ("FLAT", "0,0", 1),
        ("FLAT", "12", 0),
        ("FLAT", "", 12),
        ("FLAT", "default", 12),
        ("COMPOSITE", "0", 1),
        ("COMPOSITE", "0.0,0.1", 1),
        ("COMPOSITE", "0.0,1.1,2", 3),
        ("COMPOSITE", "0,6", 1),
    ],
)
def test_affinity_mask_in_each_hierarchy(hierarchy, mask, expected, bare):
    env = {"ZE_FLAT_DEVICE_HIERARCHY": hierarchy}
    if mask is not None:
        env["ZE_AFFINITY_MASK"] = mask
    assert look(env, intel(bare, 6)).count == expected


@pytest.mark.parametrize("hierarchy", ["", "FLAT", "COMBINED"])
def test_a_tile_compact_mask_in_the_flat_hierarchy_is_an_error(hierarchy, bare):
    env = {"ZE_AFFINITY_MASK": "0.1", "ZE_FLAT_DEVICE_HIERARCHY": hierarchy}
    with pytest.raises(InvalidVariableError, match=r"'0\.1' in it; expected tile indices"):
        look(env, intel(bare, 6))


@pytest.mark.parametrize("mask", ["a", "0,,1", "0.1.2.3", "-1", "0.", "٣"])
def test_a_mask_that_does_not_parse(mask, bare):
    env = {"ZE_AFFINITY_MASK": mask, "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
    with pytest.raises(InvalidVariableError, match="ZE_AFFINITY_MASK="):
        look(env, intel(bare, 6))


def test_a_bad_mask_on_a_host_without_intel_cards_is_only_noted(bare):
    assert "set aside: ZE_AFFINITY_MASK=0.1" in look({"ZE_AFFINITY_MASK": "0.1"}, bare).notes[0]
    assert found({"ZE_AFFINITY_MASK": "0.1"}, nvidia(bare, 2)) == ("cuda", 2)


# Tools, then /dev.


def test_the_tool_knows_better_than_dev(bare):
    # /dev of the host is bound into a container that may use one device
    env = fake(bare, "nvidia-smi", "echo 'GPU 0: NVIDIA A100 (UUID: GPU-5d5b)'")
    devices = look(env, nvidia(bare, 4))
    assert (devices.count, devices.source) == (1, "nvidia-smi -L")
    assert devices.notes == ("set aside: 4 x /dev/nvidia<N>, because nvidia-smi -L lists 1",)


def test_a_tool_that_fails_is_a_note_and_dev_counts(bare):
    said = "Failed to initialize NVML: Driver/library version mismatch"
    env = fake(bare, "nvidia-smi", f"echo '{said}'; exit 18")
    devices = look(env, nvidia(bare, 4))
    assert (devices.device_type, devices.count) == ("cuda", 4)
    assert devices.source == "4 x /dev/nvidia<N>"
    assert devices.notes == (
        f"nvidia-smi -L failed with exit status 18: {said}",
        "counted instead: 4 x /dev/nvidia<N>",
    )


def test_a_job_that_was_given_no_gpu_on_a_node_that_has_some(bare):
    env = fake(bare, "nvidia-smi", "echo 'No devices found.'")
    devices = look(env, nvidia(bare, 4), fallback=("cuda", 4, "machines/polaris.toml"))
    assert (devices.device_type, devices.count) == ("cpu", 0)
    assert devices.source == "nvidia-smi -L lists no device"
    assert devices.notes == ("set aside: 4 x /dev/nvidia<N>, because nvidia-smi -L lists 0",)


def test_a_variable_that_tells_needs_no_tool(bare):
    env = fake(bare, "nvidia-smi", f"echo asked > {bare}/asked; exit 1")
    assert found({**env, "CUDA_VISIBLE_DEVICES": "0,1"}, nvidia(bare, 4)) == ("cuda", 2)
    assert not (bare / "asked").exists()


def test_no_tool_is_started_where_there_is_no_driver(bare):
    for name in ("nvidia-smi", "amd-smi", "rocm-smi", "xpu-smi"):
        env = fake(bare, name, f"echo asked > {bare}/asked; exit 1")
    assert found(env, bare) == ("cpu", 0)
    assert not (bare / "asked").exists()


def test_no_tool_is_started_when_told_so(bare):
    env = fake(bare, "nvidia-smi", f"echo asked > {bare}/asked; exit 1")
    assert found(env, nvidia(bare, 4), tools=False) == ("cuda", 4)
    assert not (bare / "asked").exists()


def test_windows_linux_shows_one_file_for_all_gpus(bare):
    (bare / "dev/dxg").touch()
    assert found({}, bare) == ("cpu", 0)
    assert "a driver is there" in look({}, bare).notes[0]
    env = fake(bare, "nvidia-smi", "echo 'GPU 0: NVIDIA RTX A2000 (UUID: GPU-1)'")
    assert found(env, bare) == ("cuda", 1)
    assert found({**env, "CUDA_VISIBLE_DEVICES": "0,1"}, bare) == ("cuda", 1)
    assert found({"CUDA_VISIBLE_DEVICES": "0"}, bare) == ("cuda", 1)


def test_nvidia_before_amd_before_intel(bare):
    intel(amd(nvidia(bare, 1), 2), 3)
    assert look({}, bare).source == "1 x /dev/nvidia<N>"
    assert look({"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0,1"}, bare).count == 2
    assert found({"TORCH_DEVICE": "xpu"}, bare) == ("xpu", 6)


# What the caller knows of the machine.


def test_a_login_node_answers_for_its_machine(bare):
    devices = look({}, bare, fallback=MACHINE)
    assert (devices.device_type, devices.count, devices.source) == MACHINE
    assert "shows no accelerator of its own" in devices.notes[-1]


def test_a_leftover_variable_does_not_hide_the_machine(bare):
    devices = look({"CUDA_VISIBLE_DEVICES": "0"}, bare, fallback=MACHINE)
    assert (devices.count, len(devices.notes)) == (12, 2)


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles"])
def test_the_machine_is_not_asked_where_a_variable_hides_every_device(name, value, bare):
    devices = look({name: value}, bare, fallback=MACHINE)
    assert (devices.device_type, devices.count) == ("cpu", 0)
    assert devices.source == f"{name}={value!r} hides every device"


def test_what_the_host_shows_outranks_the_machine(bare):
    assert found({}, nvidia(bare, 2), fallback=MACHINE) == ("cuda", 2)


def test_a_machine_without_accelerators(bare):
    assert found({}, bare, fallback=("cpu", 0, "machines/crux.toml")) == ("cpu", 0)


def test_another_type_than_the_machines_is_asked_for(bare):
    assert found({"TORCH_DEVICE": "cuda"}, bare, fallback=MACHINE) == ("cuda", 0)
    assert found({"TORCH_DEVICE": "xpu"}, bare, fallback=MACHINE) == ("xpu", 12)


def test_nothing_is_said_with_its_source(tmp_path):
    devices = look({}, tmp_path)
    assert "no accelerator" in devices.source or devices.device_type == "mps"
