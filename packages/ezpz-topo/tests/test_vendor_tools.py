"""The vendors' tools, played by executables that print what documentation shows."""

import json

import pytest

from ezpz_topo._devices import ask_vendor_tool

NVIDIA = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-0aa11ebd-627f-af3f-1a0d-4e1fd92fd7b0)
"""
NVIDIA_MIG = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef)
  MIG 1c.3g.20gb  Device  1: (UUID: MIG-cba663e8)
"""
AMD = """GPU: 0
    BDF: 0000:23:00.0
    UUID: 00ff74a1-0000-1000-8000-000000000000
    KFD_ID: 45412
    NODE_ID: 1
    PARTITION_ID: 0

GPU: 1
    BDF: 0000:26:00.0
    UUID: 01ff74a1-0000-1000-8000-000000000000
"""
ROCM = """

============================ ROCm System Management Interface ============================
=========================================== ID ===========================================
GPU[0]\t\t: Device Name: \t\tAMD Instinct MI300A
GPU[0]\t\t: Device ID: \t\t0x74a0
GPU[1]\t\t: Device Name: \t\tAMD Instinct MI300A
GPU[1]\t\t: Device ID: \t\tN/A
==========================================================================================
================================== End of ROCm SMI Log ===================================
"""


@pytest.fixture
def fake(tmp_path):
    def make(name, text, *, status=0, then=""):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.out").write_text(text)
        record = f'echo "$@" >> {tmp_path}/{name}.argv'
        answer = f"/bin/cat {tmp_path}/{name}.out"
        path.write_text("\n".join(["#!/bin/sh", record, answer, then, f"exit {status}\n"]))
        path.chmod(0o755)
        return {"PATH": str(path.parent)}

    return make


def xpu_card(root, number, address):
    device = root / f"sys/class/drm/renderD{number}/device"
    for tile in ("tile0", "tile1"):
        (device / tile).mkdir(parents=True)
    (device / "uevent").write_text(f"PCI_CLASS=38000\nPCI_ID=8086:0BD5\nPCI_SLOT_NAME={address}\n")
    (root / "dev/dri").mkdir(parents=True, exist_ok=True)
    (root / f"dev/dri/renderD{number}").touch()


def xpu_entry(address, kind="physical"):
    return {"device_function_type": kind, "device_id": 0, "pci_bdf_address": address}


def test_nvidia_smi(fake, tmp_path):
    told = ask_vendor_tool("nvidia", fake("nvidia-smi", NVIDIA))
    assert (told.count, told.source, told.notes) == (2, "nvidia-smi -L", ())
    assert (tmp_path / "nvidia-smi.argv").read_text() == "-L\n"


def test_mig_devices_are_noted_not_counted(fake):
    told = ask_vendor_tool("nvidia", fake("nvidia-smi", NVIDIA_MIG))
    assert told.count == 1
    assert "2 MIG devices on 1 GPUs" in told.notes[0]


def test_no_devices_is_an_answer(fake):
    assert ask_vendor_tool("nvidia", fake("nvidia-smi", "No devices found.\n")).count == 0


@pytest.mark.parametrize(
    ("vendor", "tool"),
    [("nvidia", "nvidia-smi"), ("amd", "amd-smi"), ("amd", "rocm-smi"), ("intel", "xpu-smi")],
)
@pytest.mark.parametrize("text", ["", "something else\n", "[]", "{}", '{"device_list": 3}'])
def test_an_unknown_output_is_a_failure_and_not_a_zero(vendor, tool, text, fake):
    told = ask_vendor_tool(vendor, fake(tool, text))
    assert told.count is None
    assert tool in told.notes[0]


@pytest.mark.parametrize(
    ("vendor", "tool"),
    [("nvidia", "nvidia-smi"), ("amd", "amd-smi"), ("amd", "rocm-smi"), ("intel", "xpu-smi")],
)
def test_a_failure_is_told_with_its_status_and_words(vendor, tool, fake):
    told = ask_vendor_tool(vendor, fake(tool, "\n  no driver\nsecond line\n", status=9))
    assert told.count is None
    assert "failed with exit status 9: no driver" in told.notes[0]
    assert "second" not in told.notes[0]


def test_a_tool_that_hangs_is_stopped(fake):
    env = fake("nvidia-smi", NVIDIA, then="/bin/sleep 60")
    told = ask_vendor_tool("nvidia", env, time_limit=0.3)
    assert told.count is None
    assert told.notes == ("nvidia-smi -L failed: no answer in 0.3 s",)


def test_a_tool_that_cannot_be_started(fake, tmp_path):
    env = fake("nvidia-smi", NVIDIA)
    (tmp_path / "bin/nvidia-smi").write_text("#!/nonexistent/sh\n")
    told = ask_vendor_tool("nvidia", env)
    assert told.count is None
    assert "nvidia-smi -L failed: " in told.notes[0]


@pytest.mark.parametrize("vendor", ["nvidia", "amd", "intel", "apple"])
def test_a_tool_that_is_not_installed_is_worth_no_note(vendor, tmp_path):
    told = ask_vendor_tool(vendor, {"PATH": str(tmp_path)})
    assert (told.count, told.notes) == (None, ())


def test_amd_smi(fake):
    told = ask_vendor_tool("amd", fake("amd-smi", AMD))
    assert (told.count, told.source) == (2, "amd-smi list")


def test_rocm_smi_has_several_lines_a_gpu(fake):
    told = ask_vendor_tool("amd", fake("rocm-smi", ROCM))
    assert (told.count, told.source) == (2, "rocm-smi --showid")


def test_rocm_smi_where_amd_smi_fails(fake):
    fake("amd-smi", "AMDSMI_STATUS_INIT_ERROR\n", status=1)
    told = ask_vendor_tool("amd", fake("rocm-smi", ROCM))
    assert told.count == 2
    assert "AMDSMI_STATUS_INIT_ERROR" in told.notes[0]


def test_xpu_smi_lists_cards_and_sysfs_their_tiles(fake, tmp_path):
    for number, address in ((128, "0000:18:00.0"), (129, "0000:2a:00.0"), (130, "0000:3c:00.0")):
        xpu_card(tmp_path, number, address)
    listed = [
        xpu_entry("0000:18:00.0"),
        xpu_entry("0000:2A:00.0"),
        xpu_entry("0000:3c:00.0", "virtual"),
        xpu_entry("0000:00:02.0"),  # a server's graphics, which we do not count
    ]
    env = fake("xpu-smi", json.dumps({"device_list": listed}))
    told = ask_vendor_tool("intel", env, root=str(tmp_path))
    assert (told.count, told.source) == (4, "xpu-smi discovery: 4 tiles of 2 cards")
    assert ask_vendor_tool("intel", env, root=str(tmp_path), flat=False).count == 2


def test_xpu_smi_and_sysfs_that_have_no_card_in_common(fake, tmp_path):
    xpu_card(tmp_path, 128, "0000:18:00.0")
    env = fake("xpu-smi", json.dumps({"device_list": [xpu_entry("18:00.0")]}))
    told = ask_vendor_tool("intel", env, root=str(tmp_path))
    assert told.count is None
    assert "no card that sysfs shows" in told.notes[0]


def test_xpu_smi_that_finds_nothing(fake):
    assert ask_vendor_tool("intel", fake("xpu-smi", '{"device_list": null}')).count == 0


def test_the_environment_is_never_changed(fake):
    env = fake("nvidia-smi", NVIDIA)
    before = dict(env)
    ask_vendor_tool("nvidia", env)
    assert env == before
