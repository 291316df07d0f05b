import subprocess

import pytest

from ezpz_topo import InvalidVariableError, get_hostname, short_name
from ezpz_topo._hosts import hosts_of_node_file


def test_hostname_is_what_hostname_prints():
    printed = subprocess.run(["uname", "-n"], capture_output=True, text=True, check=True).stdout
    assert get_hostname() == printed.strip()


def test_short_name():
    assert short_name("x1000c0s0b0n0.hsn.cm.aurora.alcf.anl.gov") == "x1000c0s0b0n0"
    assert short_name("nid001") == "nid001"


def test_node_file_has_a_line_per_slot(tmp_path):
    path = tmp_path / "40[1].pbs-0001"
    path.write_text("x1n0.site.gov\nx1n0.site.gov\nx1n1.site.gov\n\nx1n1.site.gov\n")
    assert hosts_of_node_file(str(path)) == ("x1n0.site.gov", "x1n1.site.gov")


def test_node_file_that_cannot_be_used(tmp_path):
    with pytest.raises(InvalidVariableError, match="cannot be read"):
        hosts_of_node_file(str(tmp_path / "absent"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InvalidVariableError, match="is empty"):
        hosts_of_node_file(str(tmp_path / "empty"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidVariableError, match="cannot be read"):
        hosts_of_node_file(str(tmp_path / "bytes"))
