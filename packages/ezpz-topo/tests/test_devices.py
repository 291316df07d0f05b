"""What the kernel shows, as trees of /dev and /sys; AMD's and Intel's are from documentation."""

import pytest

from ezpz_topo._devices import intel_cards, shown_devices

PVC = {"DRIVER": "i915", "PCI_CLASS": "38000", "PCI_ID": "8086:0BD5"}
ARC = {"DRIVER": "xe", "PCI_CLASS": "30000", "PCI_ID": "8086:E20B"}
LAPTOP = {"DRIVER": "i915", "PCI_CLASS": "30000", "PCI_ID": "8086:46A6"}


def card(root, facts, *, address="0000:18:00.0", number=0, below=(), given=True):
    name = f"renderD{128 + number}"
    device = root / f"sys/class/drm/{name}/device"
    device.mkdir(parents=True)
    lines = {**facts, "PCI_SLOT_NAME": address}
    (device / "uevent").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    for folder in below:
        (device / folder).mkdir(parents=True)
    (root / "dev/dri").mkdir(parents=True, exist_ok=True)
    if given:
        (root / f"dev/dri/{name}").touch()


def counts(root, **options):
    return {shown.vendor: shown.count for shown in shown_devices(str(root), **options)}


def test_i915_shows_a_gt_a_tile(tmp_path):
    card(tmp_path, PVC, below=("drm/card0/gt/gt0", "drm/card0/gt/gt1", "drm/renderD128"))
    assert intel_cards(str(tmp_path)) == [("0000:18:00.0", 2)]
    assert counts(tmp_path) == {"intel": 2}
    assert counts(tmp_path, flat=False) == {"intel": 1}


def test_xe_shows_tiles_and_a_media_gt_is_none(tmp_path):
    card(tmp_path, PVC, below=("tile0/gt0", "tile0/gt1", "tile1/gt2", "drm/card0"))
    assert intel_cards(str(tmp_path)) == [("0000:18:00.0", 2)]


def test_a_card_without_tiles_in_sysfs_is_one_device_and_says_so(tmp_path):
    card(tmp_path, PVC)
    (shown,) = shown_devices(str(tmp_path))
    assert shown.count == 1
    assert shown.notes == ("sysfs shows no tiles of 0000:18:00.0: counted as one device each",)


def test_a_laptops_graphics_are_no_accelerator(tmp_path):
    card(tmp_path, LAPTOP, address="0000:00:02.0")
    assert counts(tmp_path) == {}


def test_a_laptops_graphics_as_a_second_card_are_no_accelerator_either(tmp_path):
    # then its PCI class is a data-centre card's: "Display controller"
    card(tmp_path, {**LAPTOP, "PCI_CLASS": "38000"}, address="0000:00:02.0")
    assert counts(tmp_path) == {}


def test_a_discrete_arc_is_an_accelerator(tmp_path):
    card(tmp_path, ARC, below=("tile0/gt0",))
    assert counts(tmp_path) == {"intel": 1}


@pytest.mark.parametrize(
    "facts",
    [
        {**PVC, "PCI_ID": "1A03:2000"},  # the server's own console
        {**PVC, "PCI_CLASS": "120000"},  # an accelerator that is no GPU
        {},
    ],
)
def test_other_cards(facts, tmp_path):
    card(tmp_path, facts)
    assert counts(tmp_path) == {}


def test_a_container_sees_the_hosts_sysfs_but_not_its_devices(tmp_path):
    card(tmp_path, PVC, number=0, below=("tile0",))
    card(tmp_path, PVC, number=1, below=("tile0",), address="0000:2A:00.0", given=False)
    assert [address for address, _ in intel_cards(str(tmp_path))] == ["0000:18:00.0"]


def test_the_hosts_kfd_in_a_container_without_its_device(tmp_path):
    node = tmp_path / "sys/class/kfd/kfd/topology/nodes/1"
    node.mkdir(parents=True)
    (node / "properties").write_text("simd_count 304\n")
    assert counts(tmp_path) == {}


@pytest.mark.parametrize("text", ["", "simd_count\n", "simd_count 0\n", "cpu_cores_count 64\n"])
def test_kfd_nodes_that_are_no_gpus(text, tmp_path):
    node = tmp_path / "sys/class/kfd/kfd/topology/nodes/0"
    node.mkdir(parents=True)
    (node / "properties").write_text(text)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert counts(tmp_path) == {"amd": 0}


def test_nvidia_device_files(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / "dev" / name).touch()
    assert counts(tmp_path) == {"nvidia": 2}


def test_wsl_cannot_be_counted(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert counts(tmp_path) == {"nvidia": None}


def test_a_host_without_drivers(tmp_path):
    assert counts(tmp_path) == {}
